r"""The manifest of a snapshot: one line an entry, the same bytes for the same tree.

    f NUL mode NUL size NUL content NUL path      a regular file; mode is octal
    d NUL mode NUL path                           a folder
    l NUL target NUL path                         a symbolic link

A folder's own entries come first, sorted by the bytes of their names, then those of each folder below it in that order.
Newlines and backslashes of paths and targets are written as `\n` and `\\`. `content` is a list of the file's pieces of
1 MiB, separated by commas: the SHA-256 of each, `0` for one that holds only zeros, `*n` behind one that comes n times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sandbox_images.base.mcp_stdio import refused

HEADER = b"toolcrib-snapshot 1\n"
CHUNK_BYTES = 1 << 20
ZEROS = bytes(CHUNK_BYTES)
ZERO = b"0"
MAX_NAME_BYTES = 255


class Entry(NamedTuple):
    """A line taken apart. `kind` is b"f", b"d", b"l", or b"p" for what a snapshot leaves out (never in a manifest)."""

    kind: bytes
    path: bytes
    mode: int = 0
    size: int = 0
    content: bytes = b""
    target: bytes = b""

    def line(self) -> bytes:
        """Ends with a newline."""
        path = escape(self.path)
        if self.kind == b"f":
            return b"f\0%o\0%d\0%s\0%s\n" % (self.mode, self.size, self.content, path)
        if self.kind == b"d":
            return b"d\0%o\0%s\n" % (self.mode, path)
        return b"%s\0%s\0%s\n" % (self.kind, escape(self.target), path)


def escape(name: bytes) -> bytes:
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n") if b"\\" in name or b"\n" in name else name


def _plain(name: bytes) -> bytes:
    if b"\\" not in name:
        return name
    return name.replace(b"\\\\", b"\0").replace(b"\\n", b"\n").replace(b"\0", b"\\")


def parse(line: bytes) -> Entry:
    """Raises ProtocolError: it is none, or its path could lead elsewhere."""
    fields = line.rstrip(b"\n").split(b"\0")
    try:
        if fields[0] == b"f" and len(fields) == 5:
            entry = Entry(b"f", _plain(fields[4]), int(fields[1], 8), int(fields[2]), fields[3])
        elif fields[0] == b"d" and len(fields) == 3:
            entry = Entry(b"d", _plain(fields[2]), int(fields[1], 8))
        elif fields[0] in (b"l", b"p") and len(fields) == 3:
            entry = Entry(fields[0], _plain(fields[2]), target=_plain(fields[1]))
        else:
            raise ValueError
        if not 0 <= entry.mode <= 0o7777 or entry.size < 0:
            raise ValueError
    except ValueError:
        raise refused("bad_archive", "A line of the snapshot can't be read.") from None
    for name in entry.path.split(b"/"):
        if name in (b"", b".", b"..") or len(name) > MAX_NAME_BYTES:
            raise refused("bad_archive", "A path of the snapshot leads out of the workspace.")
    return entry


def pieces(entry: Entry) -> Iterator[tuple[bytes, int, int]]:
    """(digest in hex, offset, length) of a file's pieces; a row of zeros is one, named ZERO. Raises ProtocolError when
    they don't make up its size.
    """
    offset = 0
    for part in entry.content.split(b",") if entry.content else ():
        digest, _, times = part.partition(b"*")
        count = int(times) if times.isdigit() else 1
        step = count * CHUNK_BYTES if digest == ZERO else CHUNK_BYTES
        for _ in range(1 if digest == ZERO else count):
            length = min(step, entry.size - offset)
            if length <= 0 or (length < step and -(-length // CHUNK_BYTES) * CHUNK_BYTES != step):
                raise refused("bad_archive", "A file of the snapshot has not its size.")
            yield digest, offset, length
            offset += length
    if offset != entry.size:
        raise refused("bad_archive", "A file of the snapshot has not its size.")


def data_bytes(size: int, content: bytes) -> int:
    """How much of a file is not zeros, in whole pieces."""
    if b"," not in content and b"*" not in content:
        return 0 if content == ZERO else size
    count = 0
    for part in content.split(b",") if content else ():
        digest, _, times = part.partition(b"*")
        if digest != ZERO:
            count += int(times or 1)
    return min(size, count * CHUNK_BYTES)


def order(path: bytes) -> bytes:
    """Sorts paths as the lines of a manifest are sorted."""
    folder, inside, name = path.rpartition(b"/")
    above = b"\1" + folder.replace(b"/", b"\0\1") + b"\0" if inside else b""
    return above + b"\0" + name


def side_by_side(have: Iterable[bytes], want: Iterable[bytes]) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Two sorted manifests merged: (ours, theirs), None where one has nothing of that path."""
    left, right = iter(have), iter(want)
    ours, theirs = next(left, None), next(right, None)
    while ours is not None or theirs is not None:
        mine = parse(ours) if ours is not None else None
        other = mine if ours == theirs else parse(theirs) if theirs is not None else None
        ahead = 0
        if mine is None or other is None:
            ahead = 1 if mine is None else -1
        elif mine is not other and mine.path != other.path:
            ahead = -1 if order(mine.path) < order(other.path) else 1
        yield (mine if ahead <= 0 else None), (other if ahead >= 0 else None)
        if ahead <= 0:
            ours = next(left, None)
        if ahead >= 0:
            theirs = next(right, None)
