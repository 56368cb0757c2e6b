"""The manifest of a snapshot, as docs/reference/sandbox-protocol.md has it: what a worker says is checked before it is kept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

HEADER = b"toolcrib-snapshot 1\n"
PIECE_BYTES = 1 << 20
MAX_BYTES = 64 << 20
PREFIX = "snap_"
_ZERO = b"0"
_RUN = re.compile(rb"(0|[0-9a-f]{64})(?:\*([1-9][0-9]{0,12}))?")
_ID = re.compile(rf"{PREFIX}([0-9a-f]{{64}})")


class NotAManifest(ValueError):  # noqa: N818 - says what it is
    pass


@dataclass(frozen=True, slots=True)
class Entry:
    """`kind` is b"f" (file), b"d" (folder) or b"l" (symbolic link)."""

    kind: bytes
    path: bytes
    mode: int = 0
    size: int = 0
    content: bytes = b""
    target: bytes = b""


def id_of(manifest: bytes) -> str:
    return PREFIX + hashlib.sha256(manifest).hexdigest()


def name_of(snapshot_id: str) -> bytes | None:
    """The name of its manifest in the BlobStore; None when it can't be an id."""
    found = _ID.fullmatch(snapshot_id)
    return bytes.fromhex(found[1]) if found else None


def lines(manifest: bytes) -> Iterator[bytes]:
    """Without the header and their newlines. Raises NotAManifest."""
    if not manifest.startswith(HEADER) or not manifest.endswith(b"\n") or len(manifest) > MAX_BYTES:
        raise NotAManifest
    start = len(HEADER)
    while start < len(manifest):
        end = manifest.index(b"\n", start)
        yield manifest[start:end]
        start = end + 1


def parse(line: bytes) -> Entry:
    """Raises NotAManifest."""
    fields = line.split(b"\0")
    try:
        match fields:
            case [b"f", mode, size, content, path]:
                entry = Entry(b"f", _plain(path), int(mode, 8), int(size), content)
            case [b"d", mode, path]:
                entry = Entry(b"d", _plain(path), int(mode, 8))
            case [b"l", target, path]:
                entry = Entry(b"l", _plain(path), target=_plain(target))
            case _:
                raise NotAManifest
    except ValueError as problem:
        raise NotAManifest from problem
    return entry


def _plain(name: bytes) -> bytes:
    if b"\\" not in name:
        return name
    return name.replace(b"\\\\", b"\0").replace(b"\\n", b"\n").replace(b"\0", b"\\")


def pieces(entry: Entry) -> Iterator[tuple[bytes, int, int]]:
    """(name, number in the file, length) of the pieces of a file that are not zeros. Raises NotAManifest."""
    number, offset = 0, 0
    for part in entry.content.split(b",") if entry.content else ():
        found = _RUN.fullmatch(part)
        if found is None:
            raise NotAManifest
        times = int(found[2] or 1)
        if found[1] == _ZERO:
            number, offset = number + times, offset + times * PIECE_BYTES
            continue
        name = bytes.fromhex(found[1].decode())
        for _ in range(times):
            length = min(PIECE_BYTES, entry.size - offset)
            if length <= 0:
                raise NotAManifest
            yield name, number, length
            number, offset = number + 1, offset + PIECE_BYTES
    if number != -(-entry.size // PIECE_BYTES):
        raise NotAManifest


def names(manifest: bytes) -> Iterator[bytes]:
    """Of all pieces, some more than once. Raises NotAManifest."""
    for line in lines(manifest):
        if line.startswith(b"f\0"):
            for name, _, _ in pieces(parse(line)):
                yield name


@dataclass(frozen=True, slots=True)
class Wanted:
    """A piece and where a worker finds it."""

    name: bytes
    line: int
    number: int
    length: int


def wanted(manifest: bytes) -> dict[bytes, Wanted]:
    """Every piece once. Raises NotAManifest."""
    found: dict[bytes, Wanted] = {}
    previous = b""
    for place, line in enumerate(lines(manifest)):
        entry = parse(line)
        here = order(entry.path)
        if here <= previous or not _is_path(entry.path):
            raise NotAManifest
        previous = here
        if entry.kind == b"f":
            for name, number, length in pieces(entry):
                found.setdefault(name, Wanted(name, place, number, length))
    return found


def _is_path(path: bytes) -> bool:
    return all(part not in (b"", b".", b"..") for part in path.split(b"/"))


def order(path: bytes) -> bytes:
    """Sorts paths as the lines of a manifest are sorted."""
    folder, inside, name = path.rpartition(b"/")
    above = b"\1" + folder.replace(b"/", b"\0\1") + b"\0" if inside else b""
    return above + b"\0" + name
