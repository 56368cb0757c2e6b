"""The tools of the fake runtime as a catalog: what `--runtime fake` offers, since it can run no image."""

from __future__ import annotations

from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.fake_server import DEFAULT_TOOLS


def fake_catalog() -> Catalog:
    tools = tuple(
        Tool(
            fake.name,
            fake.description or f"The tool {fake.name}.",
            fake.input_schema,
            None,
            fake.annotations,
            "workspace",
        )
        for fake in DEFAULT_TOOLS
    )
    image = ToolImage(
        name="workspace",
        reference="fake/workspace",
        command=("serve",),
        workspace="rw",
        egress=EgressPolicy(),
        start="eager",
        env={},
        limits=LimitsOverride(),
        tools=tools,
    )
    return Catalog({image.name: image})
