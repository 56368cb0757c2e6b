"""What a shutdown keeps for those who ask for it: each session's workspace as a tar, taken before the session is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path
from typing import IO

from toolserver.errors import RuntimeUnavailable, SandboxGone, ToolServerError
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sessions import files
from toolserver.sessions.session import Session

_log = logging.getLogger(__name__)


class _TooLarge(Exception):  # noqa: N818 - it says what the archive is
    pass


async def keep_workspaces(sessions: list[Session], folder: Path, *, max_bytes: int, within_s: float) -> None:
    """Write `folder`/<session id>.tar for every session that has a workspace, side by side, all within `within_s`.

    A file of that name is complete. Never raises: what can't be kept is one line of the log.
    """
    until = asyncio.get_running_loop().time() + within_s
    kept = [session for session in sessions if any(box.plan.image.keeps_files for box in session.boxes.values())]
    await asyncio.gather(*(_keep(session, folder, max_bytes, until) for session in kept))


async def _keep(session: Session, folder: Path, max_bytes: int, until: float) -> None:
    part, fields = folder / f".{session.session_id}.part", {"session_id": session.session_id}
    problem: object
    try:
        async with asyncio.timeout_at(until):
            with _create(part) as target:
                await _write(session, target, max_bytes)
                await asyncio.to_thread(os.fsync, target.fileno())  # complete, or not there: also after a power cut
        part.replace(folder / f"{session.session_id}.tar")
        _log.info("workspace_kept", extra={"fields": fields})
        return
    except TimeoutError:
        problem = "there was no time left"
    except _TooLarge:
        problem = f"it is larger than {max_bytes} bytes"
    except (ToolServerError, RuntimeUnavailable, RpcError, SandboxGone, OSError) as why:
        problem = why
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
    _log.error("workspace_not_kept", extra={"fields": {**fields, "problem": str(problem)}})


async def _write(session: Session, target: IO[bytes], max_bytes: int) -> None:
    opened = await files.download_archive(session)
    count = 0
    async with contextlib.aclosing(opened.stream(0, None)) as chunks:
        async for chunk in chunks:
            count += len(chunk)
            if count > max_bytes:
                raise _TooLarge
            target.write(chunk)


def _create(part: Path) -> IO[bytes]:
    """For the server's user alone."""
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")
