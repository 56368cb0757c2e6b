"""What goes wrong with a snapshot, in the contract's words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import TypeVar

from toolserver.errors import Code, RuntimeUnavailable, SandboxGone, ToolServerError
from toolserver.sandbox.stdio_client import METHOD_NOT_FOUND, RpcError

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def told(work: Awaitable[T]) -> T:
    """Await `work`, its failures told in the contract's words."""
    try:
        return await work
    except RpcError as problem:
        if problem.kind == "incomplete":
            raise ToolServerError(Code.TOO_LARGE, problem.message, effects="possible") from problem
        if problem.kind in ("too_large", "disk_full"):
            raise ToolServerError(Code.TOO_LARGE, problem.message) from problem
        if problem.code == METHOD_NOT_FOUND:
            raise ToolServerError(
                Code.NOT_IMPLEMENTED, "The image that keeps this session's workspace makes no snapshots."
            ) from problem
        message = f"The sandbox could not do it: {problem.message}"
        raise ToolServerError(Code.INTERNAL, message) from problem
    except (SandboxGone, TimeoutError) as problem:
        raise RuntimeUnavailable("The session's sandbox ended while it worked on the snapshot. Try again.") from problem


def not_found() -> ToolServerError:
    return ToolServerError(
        Code.SNAPSHOT_NOT_FOUND,
        "There is no such snapshot: it was never made, or is not kept any more. GET /v1/sessions/{id}/snapshots lists them.",
    )


def damaged(snapshot_id: str) -> ToolServerError:
    _log.error("snapshot_damaged", extra={"fields": {"snapshot_id": snapshot_id}})
    message = "A part of the snapshot is damaged on the server's disk, so it can't be used. Nothing was changed; take another one."
    return ToolServerError(Code.INTERNAL, message, effects="none")
