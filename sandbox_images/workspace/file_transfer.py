"""The extension's file methods: stat, list, open, read, write, close, delete, and archives."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Generator

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import clean, explain
from sandbox_images.base.call_memory import Reply
from sandbox_images.base.event_loop import Loop
from sandbox_images.base.mcp_stdio import INVALID_PARAMS, ProtocolError, refused
from sandbox_images.base.path_text import spell
from sandbox_images.workspace.archive_transfer import ArchiveReader, ArchiveWriter
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.file_store import Draft, FileStore, describe
from sandbox_images.workspace.quota import Quota

MAX_PIECE_BYTES = 1 << 20
MAX_HANDLES = 64
MAX_LISTED = 10_000
O_PATH = 0o10000000


class OpenFile:
    """A file open for reading."""

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path

    def read(self, offset: int, length: int) -> bytes:
        try:
            return os.pread(self.fd, length, offset)
        except OSError as problem:
            raise explain(problem, self.path) from problem

    def close(self) -> None:
        os.close(self.fd)


class FileTransfer:
    """Methods take (params, reply) and reply once, some of them later."""

    def __init__(self, loop: Loop, family: Family, store: FileStore, quota: Quota) -> None:
        self._loop, self._family, self._store, self._quota = loop, family, store, quota
        self._open: dict[int, OpenFile | Draft | ArchiveReader | ArchiveWriter] = {}
        self._count = 0

    def _hand_out(self, thing: OpenFile | Draft | ArchiveReader | ArchiveWriter) -> int:
        self._count += 1
        self._open[self._count] = thing
        return self._count

    def _room_for_handle(self) -> None:
        if len(self._open) >= MAX_HANDLES:
            raise refused("bad_handle", f"{MAX_HANDLES} files are open already: close one first.")

    def _handle(self, params: dict[str, Any]) -> Any:
        thing = self._open.get(integer(params, "handle"))
        if thing is None:
            raise refused("bad_handle", "There is no such open file.")
        return thing

    def stat(self, params: dict[str, Any], reply: Reply) -> None:
        """Of what a path leads to, as long as it stays inside."""
        path = clean(params.get("path") or ".")
        try:
            fd = self._store.workspace.open(path, O_PATH)
        except OSError as problem:
            raise explain(problem, path) from problem
        try:
            reply({"path": spell(path), **describe(os.fstat(fd))})
        finally:
            os.close(fd)

    def list(self, params: dict[str, Any], reply: Reply) -> None:
        path = clean(params.get("path") or ".")
        limit = max(1, min(MAX_LISTED, integer(params, "limit", 1000)))

        def work() -> Generator[None, None, dict[str, Any]]:
            entries, more = yield from self._store.listing(path, limit)
            return {"path": spell(path), "entries": entries, "truncated": more}

        self._loop.start(replying(work(), reply))

    def open(self, params: dict[str, Any], reply: Reply) -> None:
        path, mode = clean(params.get("path")), params.get("mode")
        self._room_for_handle()
        if mode == "r":
            fd, info = self._store.workspace.open_regular(path)
            reply({"handle": self._hand_out(OpenFile(fd, path)), "bytes": info.st_size})
        elif mode == "w":
            reply({"handle": self._hand_out(self._store.draft(path)), "bytes": 0})
        else:
            raise ProtocolError(INVALID_PARAMS, 'mode must be "r" or "w"')

    def read(self, params: dict[str, Any], reply: Reply) -> None:
        thing = self._handle(params)
        offset, length = integer(params, "offset"), integer(params, "length")
        if offset < 0 or not 0 < length <= MAX_PIECE_BYTES:
            raise ProtocolError(INVALID_PARAMS, f"offset must not be negative, length from 1 to {MAX_PIECE_BYTES}")

        def answer(data: bytes | ProtocolError) -> None:
            reply(
                data
                if isinstance(data, ProtocolError)
                else {"data": base64.b64encode(data).decode(), "eof": len(data) < length}
            )

        if isinstance(thing, OpenFile):
            answer(thing.read(offset, length))
        elif isinstance(thing, ArchiveReader):
            thing.read(offset, length, answer)
        else:
            raise refused("bad_handle", "This file is open for writing.")

    def write(self, params: dict[str, Any], reply: Reply) -> None:
        thing = self._handle(params)
        try:
            data = base64.b64decode(params.get("data") or "", validate=True)
        except (binascii.Error, ValueError, TypeError):
            raise ProtocolError(INVALID_PARAMS, "data must be base64") from None
        if len(data) > MAX_PIECE_BYTES:
            raise ProtocolError(INVALID_PARAMS, f"data must have at most {MAX_PIECE_BYTES} bytes")
        if isinstance(thing, Draft):
            thing.write(data)
            reply({})
        elif isinstance(thing, ArchiveWriter):
            thing.write(data, lambda problem: reply({} if problem is None else problem))
        else:
            raise refused("bad_handle", "This file is open for reading.")

    def close(self, params: dict[str, Any], reply: Reply) -> None:
        thing = self._handle(params)
        del self._open[params["handle"]]
        commit = params.get("commit") is True
        if isinstance(thing, ArchiveWriter):
            thing.close(reply, commit=commit)
            return
        if isinstance(thing, Draft):
            if commit:
                thing.commit()
            else:
                thing.discard()
        else:
            thing.close()
        reply({})

    def delete(self, params: dict[str, Any], reply: Reply) -> None:
        path = clean(params.get("path"))

        def work() -> Generator[None, None, dict[str, Any]]:
            yield from self._store.delete(path, recursive=True)
            return {}

        self._loop.start(replying(work(), reply))

    def open_archive(self, params: dict[str, Any], reply: Reply) -> None:
        mode = params.get("mode")
        if mode not in ("r", "w"):
            raise ProtocolError(INVALID_PARAMS, 'mode must be "r" or "w"')
        self._room_for_handle()
        kind = ArchiveReader if mode == "r" else ArchiveWriter
        try:
            reply({"handle": self._hand_out(kind(self._loop, self._family, self._store))})
        except OSError as problem:
            raise refused(
                "too_large", "The session's limit of processes is used up: end some, then try again."
            ) from problem


def integer(params: dict[str, Any], name: str, default: int | None = None) -> int:
    value = params.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ProtocolError(INVALID_PARAMS, f"{name} must be an integer")
    return value


def replying(work: Generator[None, None, dict[str, Any]], reply: Reply) -> Generator[None, None, None]:
    """Run `work` in slices and reply with what comes of it."""
    try:
        answer: dict[str, Any] | ProtocolError = yield from work
    except ProtocolError as problem:
        answer = problem
    except OSError as problem:
        answer = explain(problem, "the path")
    reply(answer)
