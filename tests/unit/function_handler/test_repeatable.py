"""Which tools may be sent again: of added images by the operator's word, whatever the image says of itself."""

from __future__ import annotations

import pytest

from agent.tools.catalog import _effect
from agent.toolserver_client.wire import RemoteTool

CLAIMS = {"readOnlyHint": True, "idempotentHint": True}


@pytest.mark.parametrize(
    ("retry", "annotations", "effect"),
    [
        (None, {}, "once"),
        (None, {"readOnlyHint": True}, "read"),
        (None, {"idempotentHint": True}, "idempotent"),
        ("never", CLAIMS, "once"),
        ("idempotent", {}, "idempotent"),
        ("something new", CLAIMS, "once"),
    ],
)
def test_the_operator_decides_for_added_images(retry: str | None, annotations: dict[str, bool], effect: str) -> None:
    assert _effect(RemoteTool(name="t", annotations=annotations, retry=retry)) == effect
