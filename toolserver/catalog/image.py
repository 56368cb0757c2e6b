"""Tool images and their tools, as the server knows them once their manifests were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from jsonschema.protocols import Validator
from pydantic import SecretStr

from toolserver.catalog.schema import compile_schema


@dataclass(frozen=True, eq=False)
class Tool:
    """One tool. `image` is the name of the image that has it, or `toolserver` for the server's own."""

    name: str
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    annotations: dict[str, Any]
    image: str

    def as_json(self) -> dict[str, Any]:
        """As the HTTP contract shows it. A new dict, whose schemas are shared: don't change them."""
        shown: dict[str, Any] = {"name": self.name, "description": self.description, "input_schema": self.input_schema}
        if self.output_schema is not None:
            shown["output_schema"] = self.output_schema
        return {**shown, "annotations": self.annotations, "image": self.image}

    @cached_property
    def validator(self) -> Validator:
        """Compiled from `input_schema`, once. Use `arguments.check`, which bounds its time."""
        return compile_schema(self.input_schema)


@dataclass(frozen=True)
class LimitsOverride:
    """Bounds below the session's limits: the lower one holds; None: the session's own. MiB, cores, processes, MiB."""

    memory_mb: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk_mb: int | None = None


@dataclass(frozen=True)
class ToolImage:
    """An MCP server on stdio that runs in sandboxes.

    reference: the engine's name of the image, with its tag. command: what to run in it. network: what its sandboxes get
    in a session whose egress is `open`; others get none. start: `eager` with the session, `lazy` at its first call.
    env is fixed at start and visible to whoever may inspect the sandbox. secrets are not in it: they are for the
    protocol's `toolcrib/bind`, where they win over the session's env, and are neither logged nor shown by repr.
    """

    name: str
    reference: str
    command: tuple[str, ...]
    workspace: Literal["none", "ro", "rw"]
    network: Literal["none", "open"]
    start: Literal["eager", "lazy"]
    env: Mapping[str, str]
    limits: LimitsOverride
    tools: tuple[Tool, ...]
    secrets: Mapping[str, SecretStr] = field(default_factory=dict, repr=False)
