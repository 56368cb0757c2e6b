"""The extension's snapshot methods: a scan's manifest by pages, the pieces of its files, and restores."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Generator

from sandbox_images.base.annotations import Any
from sandbox_images.base.call_memory import Reply
from sandbox_images.base.event_loop import Clock, Loop
from sandbox_images.base.mcp_stdio import INVALID_PARAMS, ProtocolError, refused
from sandbox_images.workspace.file_store import FileStore
from sandbox_images.workspace.file_transfer import integer, replying
from sandbox_images.workspace.snapshot_manifest import CHUNK_BYTES, HEADER, parse
from sandbox_images.workspace.snapshot_restore import Restore, read_piece
from sandbox_images.workspace.snapshot_scan import Known, Scan, digest, scan
from sandbox_images.workspace.snapshot_tree import Tree

MAX_OPEN_SCANS = 2  # what a server that died left open goes when it is needed
MAX_PAGE_BYTES = 1 << 20
MAX_TOLD = 100
Answer = Generator[None, None, dict[str, Any]]


class SnapshotTransfer:
    """Methods take (params, reply) and reply once, some of them later."""

    def __init__(self, loop: Loop, store: FileStore) -> None:
        self._loop, self._store = loop, store
        self._known = Known()
        self._scans: dict[int, Scan] = {}
        self._restores: dict[int, Restore] = {}
        self._count = 0
        self.methods: dict[str, Callable[[dict[str, Any], Reply], None]] = {
            "snapshot.scan": self.scan, "snapshot.manifest": self.manifest, "snapshot.read": self.read, "snapshot.close": self.close,
            "restore.begin": self.begin, "restore.manifest": self.put_manifest, "restore.step": self.step,
            "restore.commit": self.commit, "restore.close": self.give_up,
        }  # fmt: skip

    def _number(self) -> int:
        self._count += 1
        return self._count

    # ---- snapshots

    def scan(self, params: dict[str, Any], reply: Reply) -> None:
        max_bytes, full = integer(params, "max_bytes"), params.get("full") is True

        def work() -> Answer:
            found = yield from scan(self._store.workspace, self._known, max_bytes=max_bytes, full=full)
            while len(self._scans) >= MAX_OPEN_SCANS:
                del self._scans[min(self._scans)]
            number = self._number()
            self._scans[number] = found
            left_out = [parse(line) for line in found.left_out[:MAX_TOLD]]
            return {
                "handle": number,
                "entries": len(found.lines),
                "bytes": found.manifest_bytes,
                "files": found.files,
                "file_bytes": found.bytes,
                "read_bytes": found.read_bytes,
                "left_out": [{"path": shown(entry.path), "kind": entry.target.decode()} for entry in left_out],
                "left_out_more": len(found.left_out) > MAX_TOLD,
            }

        self._loop.start(replying(work(), reply))

    def _scan(self, params: dict[str, Any]) -> Scan:
        found = self._scans.get(integer(params, "handle"))
        if found is None:
            raise refused("bad_handle", "There is no such scan.")
        return found

    def manifest(self, params: dict[str, Any], reply: Reply) -> None:
        found, first = self._scan(params), integer(params, "line")
        if not 0 <= first <= len(found.lines):
            raise ProtocolError(INVALID_PARAMS, "there is no such line")
        page, length, place = [HEADER] if first == 0 else [], 0, first
        while place < len(found.lines) and (not length or length + len(found.lines[place]) <= MAX_PAGE_BYTES):
            page.append(found.lines[place])
            length += len(found.lines[place])
            place += 1
        data = base64.b64encode(b"".join(page)).decode()
        reply({"data": data, "next": place, "eof": place == len(found.lines)})

    def read(self, params: dict[str, Any], reply: Reply) -> None:
        found, wanted = self._scan(params), params.get("want")
        if not isinstance(wanted, list):
            raise ProtocolError(INVALID_PARAMS, "want must be a list of [line, piece]")
        places = []
        for one in wanted:
            good = isinstance(one, list) and len(one) == 2 and all(type(number) is int for number in one)
            if not good or not 0 <= one[0] < len(found.lines):
                raise ProtocolError(INVALID_PARAMS, "want must be a list of [line, piece]")
            places.append((one[0], one[1]))
        self._loop.start(replying(self._read(found, places), reply))

    def _read(self, found: Scan, places: list[tuple[int, int]]) -> Answer:
        tree, clock = Tree(self._store.workspace), Clock()
        blobs: list[str | None] = []
        total = 0
        try:
            for line, piece in places:
                entry, known = found.file(line)
                if piece * CHUNK_BYTES not in known:
                    raise ProtocolError(INVALID_PARAMS, "there is no such piece")
                name, offset, length = known[piece * CHUNK_BYTES]
                total += length
                if total > MAX_PAGE_BYTES:
                    raise ProtocolError(INVALID_PARAMS, f"at most {MAX_PAGE_BYTES} bytes at a time")
                data = read_piece(tree, entry.path, offset, length)
                blobs.append(base64.b64encode(data).decode() if data is not None and digest(data) == name else None)
                if clock.spent():
                    yield
                    clock.start()
        finally:
            tree.put_back()
        return {"blobs": blobs}

    def close(self, params: dict[str, Any], reply: Reply) -> None:
        self._scan(params)
        del self._scans[params["handle"]]
        reply({})

    # ---- restores

    def begin(self, params: dict[str, Any], reply: Reply) -> None:
        """One at a time: an earlier one that was left open is given up."""
        full = params.get("full") is True

        def work() -> Answer:
            while self._restores:
                _, earlier = self._restores.popitem()
                while earlier.busy:
                    yield
                yield from earlier.close()
            number = self._number()
            self._restores[number] = Restore(self._store, self._known, full=full)
            return {"handle": number}

        self._loop.start(replying(work(), reply))

    def _restore(self, params: dict[str, Any]) -> Restore:
        found = self._restores.get(integer(params, "handle"))
        if found is None:
            raise refused("bad_handle", "There is no such restore.")
        if found.busy:
            raise refused("bad_handle", "The restore is at work: wait for its answer.")
        return found

    def put_manifest(self, params: dict[str, Any], reply: Reply) -> None:
        self._restore(params).add_manifest(_data(params.get("data")))
        reply({})

    def step(self, params: dict[str, Any], reply: Reply) -> None:
        restore, given = self._restore(params), params.get("blobs")
        if not isinstance(given, list):
            raise ProtocolError(INVALID_PARAMS, "blobs must be a list of base64")
        blobs = [_data(one) for one in given]

        def work() -> Answer:
            lack = yield from restore.step(blobs)
            return {"lack": [name.decode() for name in lack], "staged": not lack}

        self._loop.start(replying(restore.working(work()), reply))

    def commit(self, params: dict[str, Any], reply: Reply) -> None:
        restore = self._restore(params)

        def work() -> Answer:
            try:
                done = yield from restore.commit()
            finally:
                self._restores.pop(params["handle"], None)
                yield from restore.close()
            return {**done, "differs": [shown(path) for path in done["differs"]]}

        self._loop.start(replying(restore.working(work()), reply))

    def give_up(self, params: dict[str, Any], reply: Reply) -> None:
        restore = self._restore(params)
        del self._restores[params["handle"]]

        def work() -> Answer:
            yield from restore.close()
            return {}

        self._loop.start(replying(work(), reply))


def shown(path: bytes) -> str:
    r"""A path as text: bytes that are no UTF-8 as \xNN."""
    return path.decode("utf-8", "backslashreplace")


def _data(value: Any) -> bytes:
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ProtocolError(INVALID_PARAMS, "data must be base64") from None
    if len(data) > max(MAX_PAGE_BYTES, CHUNK_BYTES) * 5:
        raise ProtocolError(INVALID_PARAMS, "the data is too large")
    return data
