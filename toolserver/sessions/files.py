"""A session's files, through the worker of its workspace sandbox: whole streams with bounded memory.

Raises of all: ToolServerError (file_not_found, too_large, invalid_arguments, quota_exceeded), RuntimeUnavailable.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from toolserver.errors import Code, RuntimeUnavailable, SandboxGone, ToolServerError, invalid
from toolserver.sandbox import worker_files
from toolserver.sandbox.stdio_client import RpcError, StdioClient
from toolserver.sandbox.worker_files import Handle
from toolserver.sessions.session import Session

T = TypeVar("T")


async def client_of(session: Session) -> StdioClient:
    """The client of the sandbox that keeps the workspace. Raises file_not_found, RuntimeUnavailable."""
    for box in session.boxes.values():
        if box.plan.image.keeps_files:
            sandbox = await box.sandbox()
            if sandbox.has_worker:
                return sandbox.client
    raise ToolServerError(
        Code.FILE_NOT_FOUND,
        "The session has no files: none of its images works on the workspace. Create one with the image workspace.",
    )


async def _told(path: str, work: Awaitable[T]) -> T:
    """Await `work`, its failures told in the contract's words."""
    try:
        return await work
    except RpcError as problem:
        raise _refusal(path, problem) from problem
    except (SandboxGone, TimeoutError) as problem:
        raise RuntimeUnavailable("The session's sandbox ended while it worked on the file. Try again.") from problem


def _refusal(path: str, problem: RpcError) -> ToolServerError:
    match problem.kind:
        case "not_found":
            return ToolServerError(
                Code.FILE_NOT_FOUND, f"{problem.message} GET /v1/sessions/{{id}}/files lists what there is."
            )
        case "too_large":
            return ToolServerError(Code.TOO_LARGE, problem.message)
        case "disk_full":
            message = f"{problem.message} The workspace has no room for it: delete files, or ask for a larger disk_mb."
            return ToolServerError(Code.TOO_LARGE, message)
        case "invalid_path" | "not_regular" | "is_directory" | "exists" | "bad_archive":
            return invalid(path, problem.message)
        case _:
            return ToolServerError(Code.INTERNAL, f"The sandbox could not do it: {problem.message}", effects="none")


async def listing(session: Session, path: str, limit: int) -> dict[str, Any]:
    with session.in_use():
        return await _told("path", worker_files.listing(await client_of(session), path, limit))


async def delete(session: Session, path: str) -> None:
    with session.in_use(), session.writing():
        await _told("path", worker_files.delete(await client_of(session), path))


@dataclass
class Download:
    """Opened already: what can be refused was refused. Read it by `stream`, once, or `close` it."""

    session: Session
    handle: Handle

    @property
    def size(self) -> int:
        return self.handle.size

    async def stream(self, start: int, length: int | None) -> AsyncGenerator[bytes, None]:
        """`length` bytes from `start`, all up to the end for None; closes the handle. A break raises: the answer ends unfinished."""
        with self.session.in_use():
            left = length
            try:
                async with contextlib.aclosing(self.handle.read(start, length)) as chunks:
                    async for chunk in chunks:
                        left = None if left is None else left - len(chunk)
                        yield chunk
                if left:
                    raise SandboxGone("the file became shorter while it was read")
            finally:
                # not awaited here: a client that hangs up cancels whatever this waits for
                self.session.background.spawn(self.close(), "close a download")

    async def close(self) -> None:
        with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
            await self.handle.close()


async def download(session: Session, path: str) -> Download:
    with session.in_use():
        return Download(session, await _told("path", worker_files.open_file(await client_of(session), path, "r")))


async def download_archive(session: Session) -> Download:
    with session.in_use():
        return Download(session, await _told("archive", worker_files.open_archive(await client_of(session), "r")))


async def upload(
    session: Session, path: str, body: AsyncIterator[bytes], check: Callable[[int], None]
) -> tuple[int, bool]:
    """Put a file in place in one step; its size, and whether it is new. `check` is told the size so far and may raise."""
    with session.in_use(), session.writing():
        client = await client_of(session)
        new = False
        try:
            await worker_files.stat(client, path)
        except RpcError as problem:
            new = problem.kind == "not_found"
        except (SandboxGone, TimeoutError):
            client = await client_of(session)
        size, _ = await _fill(await _told("path", worker_files.open_file(client, path, "w")), "path", body, check)
        return size, new


async def upload_archive(session: Session, body: AsyncIterator[bytes], check: Callable[[int], None]) -> int:
    """Unpack a tar over the workspace, all or nothing; how many files."""
    with session.in_use(), session.writing():
        handle = await _told("archive", worker_files.open_archive(await client_of(session), "w"))
        _, done = await _fill(handle, "archive", body, check)
        count = done.get("files")
        return count if isinstance(count, int) else 0


async def _fill(
    handle: Handle, pointer: Literal["path", "archive"], body: AsyncIterator[bytes], check: Callable[[int], None]
) -> tuple[int, dict[str, Any]]:
    size, committed = 0, False
    try:
        async for chunk in body:
            size += len(chunk)
            check(size)
            await _told(pointer, handle.write(chunk))
        await _told(pointer, handle.arrived())
        committed = True  # a commit that fails has closed the handle as well
        return size, await _told(pointer, handle.close(commit=True))
    finally:
        if not committed:
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                await handle.close()
