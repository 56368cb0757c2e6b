"""Keeps the run's copy of the workspace and the session's the same: changes are fetched, a new session is filled."""

from __future__ import annotations

import asyncio
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from typing import IO

from agent.tools.text import size
from agent.tools.workspace_archive import no_file, unpack
from agent.tools.workspace_store import NotKept, WorkspaceStore, safe_parts
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ClientProblem, ToolServerAnswer

MANY = 64  # from here on one archive is moved instead of single files
_CHUNK = 1 << 20
_MAX_TOLD = 10
_TAR_OVERHEAD = 1 << 26

Note = Callable[[str], None]
"""Told, in a sentence for the report, when something is left out."""


class WorkspaceSync:
    """One session's files and the store's. Transfers take turns, so that parallel calls don't mix."""

    def __init__(self, client: ToolServerClient, store: WorkspaceStore, note: Note) -> None:
        self._client, self._store, self._tell = client, store, note
        self._turn = asyncio.Lock()
        self._pending: set[str] = set()  # changed, but not fetched yet
        self._all_pending = False
        self._notes: list[str] = []  # gathered, since parts of the work are done in threads

    async def fill(self, session_id: str) -> int:
        """Put the store's files into a new session; how many. Raises ToolServerAnswer, NoAnswer when the session is no use."""
        async with self._turn:
            self._pending.clear()
            self._all_pending = False
            files = self._store.files()
            try:
                if len(files) < MANY:
                    return await self._put_files(session_id, files)
                await self._put_archive(session_id, list(files))
                return len(files)
            finally:
                self._flush()

    async def pull(self, session_id: str, changed: list[str], *, everything: bool) -> str:
        """Fetch what changed and apply what was deleted; `everything` compares the whole workspace.

        Never raises for the ToolServer or the disk. What could not be fetched is noted, told in the answer (else empty), and
        tried again with the next call.
        """
        if not (changed or everything or self._pending or self._all_pending):
            return ""
        async with self._turn:
            self._pending |= {path.rstrip("/") for path in changed}
            self._all_pending |= everything
            try:
                if self._all_pending or len(self._pending) >= MANY:
                    await self._pull_archive(session_id)
                else:
                    for path in sorted(self._pending):
                        await self._pull_file(session_id, path)
                        self._pending.discard(path)
                self._pending.clear()
                self._all_pending = False
            except ClientProblem as problem:
                what = (
                    f"{len(self._pending)} changed files ({_named(self._pending)})"
                    if self._pending
                    else "The changed files"
                )
                told = f"{what} could not be fetched from the session: {problem.message}"
                self._notes.append(f"{told} The run's folder has their state from before.")
                return told
            finally:
                self._flush()
        return ""

    async def add(self, session_id: str | None, path: str, data: bytes) -> bool:
        """Keep a file of our own making in the store and, if there is one, in the session; whether the store has it."""
        async with self._turn:
            try:
                with self._store.writer(path) as target:
                    target.write(data)
                    target.commit()
            except NotKept as problem:
                self._tell(f"{path} is not kept: {problem}")
                return False
            if session_id is None:
                return True
            try:
                await self._client.put_file(session_id, path, _once(data), len(data))
            except ClientProblem as problem:
                self._tell(f"{path} is in the run's folder, but not in the session: {problem.message}")
            return True

    def _flush(self) -> None:
        notes, self._notes = self._notes, []
        for text in notes[:_MAX_TOLD]:
            self._tell(text)
        if len(notes) > _MAX_TOLD:
            self._tell(f"{len(notes) - _MAX_TOLD} more files are left out for reasons like these.")

    async def _put_files(self, session_id: str, files: dict[str, int]) -> int:
        filled = 0
        for path, count in files.items():
            try:
                with self._store.open(path) as stream:
                    await self._client.put_file(session_id, path, _chunks(stream), count)
                filled += 1
            except (OSError, NotKept) as problem:
                self._notes.append(
                    f"{path} could not be read from the run's folder and is missing in the session: {problem}"
                )
            except ToolServerAnswer as refused:
                if refused.status not in (413, 422):
                    raise
                self._notes.append(f"The ToolServer refused the file {path}: {refused.message}")
        return filled

    async def _pull_file(self, session_id: str, path: str) -> None:
        try:
            safe_parts(path)
            async with self._client.get_file(session_id, path) as download:
                with self._store.writer(path) as target:
                    if download.bytes_total is not None:
                        target.expect(download.bytes_total)
                    async for chunk in download.chunks:
                        target.write(chunk)
                    target.commit()
        except NotKept as problem:
            self._leave_out(path, str(problem))
        except ToolServerAnswer as refused:
            if refused.code in ("session_gone", "session_not_found") or refused.status not in (404, 422):
                raise
            if refused.code == "file_not_found":
                self._store.delete(path)
            else:
                no_file(self._store, path)

    def _leave_out(self, path: str, why: str) -> None:
        """An older copy must not pass for the file."""
        self._store.delete(path)
        self._notes.append(f"{path} is left out of the run's folder: {why}.")

    async def _pull_archive(self, session_id: str) -> None:
        with tempfile.TemporaryFile() as archive:
            most = self._store.max_total_bytes + _TAR_OVERHEAD
            async with self._client.get_archive(session_id) as download:
                async for chunk in download.chunks:
                    archive.write(chunk)
                    if archive.tell() > most:
                        self._notes.append(
                            f"The workspace is larger than {size(most)}; the run's folder has its state from before."
                        )
                        return
            archive.seek(0)
            await asyncio.to_thread(self._unpack, archive, None if self._all_pending else frozenset(self._pending))

    def _unpack(self, archive: IO[bytes], wanted: frozenset[str] | None) -> None:
        """`wanted` None: all, and what the archive does not have is deleted."""
        try:
            unpack(archive, self._store, self._leave_out, wanted)
        except (tarfile.TarError, EOFError) as problem:
            self._notes.append(
                f"The archive of the workspace can't be read ({problem}); the run's folder may be behind."
            )

    async def _put_archive(self, session_id: str, paths: list[str]) -> None:
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(self._pack, archive, paths)
            count = archive.tell()
            archive.seek(0)
            await self._client.put_archive(session_id, _chunks(archive), count)

    def _pack(self, archive: IO[bytes], paths: list[str]) -> None:
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in paths:
                try:
                    with self._store.open(path) as stream:
                        member = tarfile.TarInfo(path)
                        status = os.fstat(stream.fileno())
                        member.size, member.mtime, member.mode = status.st_size, int(status.st_mtime), 0o644
                        tar.addfile(member, stream)
                except (OSError, NotKept) as problem:
                    self._notes.append(
                        f"{path} could not be read from the run's folder and is missing in the session: {problem}"
                    )


async def _chunks(stream: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(stream.read, _CHUNK):
        yield chunk


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _named(paths: set[str]) -> str:
    shown = sorted(paths)[:_MAX_TOLD]
    return ", ".join(shown) + (f" and {len(paths) - len(shown)} more" if len(paths) > len(shown) else "")
