"""Archives on their way through the protocol: between `file.read`, `file.write` and the helper that packs or unpacks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from sandbox_images.base.annotations import Any
from sandbox_images.base.event_loop import Loop
from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.file_store import INCOMING, FileStore
from sandbox_images.workspace.helper_process import Helper

Report = dict[str, Any] | None


def _pack(store: FileStore) -> Callable[[int, int], dict[str, Any]]:
    def work(_from_fd: int, to_fd: int) -> dict[str, Any]:
        from sandbox_images.workspace import archive  # noqa: PLC0415 - in the helper alone: it is large

        return archive.pack(store.workspace, to_fd)

    return work


def _unpack(store: FileStore, staging: str, room: int) -> Callable[[int, int], dict[str, Any]]:
    def work(from_fd: int, _to_fd: int) -> dict[str, Any]:
        from sandbox_images.workspace import archive  # noqa: PLC0415

        return archive.unpack(store.workspace, staging, room, from_fd)

    return work


class ArchiveReader:
    """The workspace as a tar, read in order."""

    def __init__(self, loop: Loop, family: Family, store: FileStore) -> None:
        self._helper = Helper(loop, family, _pack(store), self._on_end)
        self._offset, self._buffer, self._at_end = 0, bytearray(), False
        self._ended = False
        self._report: Report = None
        self._waiting: tuple[int, Callable[[bytes | ProtocolError], None]] | None = None

    def read(self, offset: int, length: int, answer: Callable[[bytes | ProtocolError], None]) -> None:
        if offset != self._offset or self._waiting is not None:
            raise refused(
                "bad_handle", f"An archive is read in order, one piece at a time: the next offset is {self._offset}."
            )
        self._waiting = (length, answer)
        self._go_on()

    def _go_on(self) -> None:
        """Answer when enough is there, or all; else wait for more."""
        if self._waiting is None:
            return
        length, answer = self._waiting
        while len(self._buffer) < length and not self._at_end:
            try:
                data = os.read(self._helper.from_fd, length - len(self._buffer))
            except BlockingIOError:
                self._helper.when_readable(self._go_on)
                return
            self._buffer += data
            self._at_end = not data
        if len(self._buffer) < length and not self._ended:
            return  # the report says whether it is whole; `_on_end` comes back here
        self._waiting = None
        if len(self._buffer) < length and self._report is None:
            answer(refused("bad_archive", "The archive could not be made whole. Try again."))
            return
        data = bytes(self._buffer[:length])
        del self._buffer[:length]
        self._offset += len(data)
        answer(data)

    def _on_end(self, report: Report) -> None:
        self._ended, self._report = True, report
        self._go_on()

    def close(self) -> None:
        self._helper.kill()
        self._helper.close()
        if self._waiting is not None:
            answer, self._waiting = self._waiting[1], None
            answer(refused("bad_handle", "The archive was closed."))


class ArchiveWriter:
    """A tar on its way in."""

    def __init__(self, loop: Loop, family: Family, store: FileStore) -> None:
        self._loop, self._store = loop, store
        self._staging = f"{INCOMING}/archive-{os.urandom(8).hex()}"
        self._helper = Helper(loop, family, _unpack(store, self._staging, store.quota.left()), self._on_end)
        self._ended = False
        self._report: Report = None
        self._data = memoryview(b"")
        self._answer: Callable[[ProtocolError | None], None] | None = None
        self._closing: Callable[[dict[str, Any] | ProtocolError], None] | None = None
        self._aborted = False

    def write(self, data: bytes, answer: Callable[[ProtocolError | None], None]) -> None:
        if self._answer is not None:
            raise refused("bad_handle", "An archive is written one piece at a time.")
        self._data, self._answer = memoryview(data), answer
        self._go_on()

    def _go_on(self) -> None:
        if self._answer is None:
            return
        problem: ProtocolError | None = None
        try:
            while self._data and not self._ended:
                self._data = self._data[os.write(self._helper.to_fd, self._data) :]
        except BlockingIOError:
            self._helper.when_writable(self._go_on)
            return
        except BrokenPipeError:
            if not self._ended:
                self._helper.close_input()
                return  # it has refused the archive; the report says why
        if self._ended:
            problem = self._problem()
        answer, self._answer = self._answer, None
        answer(problem)

    def _problem(self) -> ProtocolError:
        report = self._report
        if report is None or "kind" not in report:
            return refused("bad_archive", "The archive could not be unpacked. Try again.")
        return refused(report["kind"], report["message"])

    def _on_end(self, report: Report) -> None:
        self._ended, self._report = True, report
        self._helper.close()
        self._store.quota.stale = True
        self._go_on()
        if self._closing is not None:
            self._finish(self._closing)

    def close(self, reply: Callable[[dict[str, Any] | ProtocolError], None], *, commit: bool) -> None:
        self._closing, self._aborted = reply, not commit
        if not commit:
            self._helper.kill()
        self._helper.close_input()
        if self._ended:
            self._finish(reply)

    def _finish(self, reply: Callable[[dict[str, Any] | ProtocolError], None]) -> None:
        self._closing = None
        self._loop.start(self._clear(reply))

    def _clear(self, reply: Callable[[dict[str, Any] | ProtocolError], None]) -> Any:
        """Delete what was staged and not moved into place."""
        with suppress(ProtocolError):  # it may never have been made
            yield from self._store.delete(self._staging, recursive=True)
        report = self._report
        if self._aborted:
            reply({})
        elif report is not None and "files" in report:
            reply({"files": report["files"]})
        else:
            reply(self._problem())
