"""What a restore must do: a scan of what is there, compared with the manifest of what is wanted."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from heapq import merge

from sandbox_images.base.event_loop import Clock
from sandbox_images.base.mcp_stdio import refused
from sandbox_images.workspace.snapshot_manifest import ZERO, Entry, order, parse, pieces, side_by_side
from sandbox_images.workspace.snapshot_scan import Scan
from sandbox_images.workspace.snapshot_tree import FULL, parted

Place = tuple[bytes, int, int]  # path, offset, length


class Plan:
    """All in the order of the manifest. `doomed`: paths that go, with all that is below. `freed`: bytes on disk of what
    goes or is replaced.
    """

    def __init__(self) -> None:
        self.doomed: list[bytes] = []
        self.shut: list[tuple[bytes, int]] = []  # doomed folders that we are shut out of, and their modes
        self.make: list[Entry] = []
        self.modes: list[Entry] = []
        self.freed = 0
        self._gone: set[bytes] = set()

    def compare(self, have: Scan, want: list[bytes]) -> Generator[None, None, None]:
        """Raises ProtocolError: the manifest can't be read."""
        clock = Clock()
        for ours, theirs in side_by_side(all_lines(have), want):
            if ours is not theirs:
                self._differ(ours, theirs)
            if clock.spent():
                yield
                clock.start()
        yield from self._count_freed(have)

    def _differ(self, ours: Entry | None, theirs: Entry | None) -> None:
        if theirs is not None and theirs.kind == b"f" and sum(length for _, _, length in pieces(theirs)) != theirs.size:
            raise refused("bad_archive", "A file of the snapshot has not its size.")
        if ours is not None and (theirs is None or theirs.kind != ours.kind):
            self._doom(ours)
        if theirs is None:
            return
        wanted = (theirs.kind, theirs.size, theirs.content, theirs.target)
        if ours is None or (ours.kind, ours.size, ours.content, ours.target) != wanted:
            self.make.append(theirs)
        elif ours.mode != theirs.mode:
            self.modes.append(theirs)

    def _doom(self, entry: Entry) -> None:
        inside = parted(entry.path)[0] in self._gone
        if entry.kind == b"d":
            self._gone.add(entry.path)
            if entry.mode & FULL != FULL:
                self.shut.append((entry.path, entry.mode))
        if not inside:
            self.doomed.append(entry.path)

    def _count_freed(self, have: Scan) -> Generator[None, None, None]:
        replaced = {*self.doomed, *(entry.path for entry in self.make)}
        clock = Clock()
        for line, size in zip(have.lines, have.blocks, strict=True):
            if size and replaced:
                path = parse(line).path
                if path in replaced or parted(path)[0] in self._gone:
                    self.freed += size
            if clock.spent():
                yield
                clock.start()

    def local_pieces(self, have: Scan) -> Generator[None, None, dict[bytes, Place]]:
        """Where the workspace holds pieces that are needed: those need not come from the server."""
        needed: set[bytes] = set()
        found: dict[bytes, Place] = {}
        clock = Clock()
        for entry in self.make:
            needed.update(name for name, _, _ in (pieces(entry) if entry.kind == b"f" else ()) if name != ZERO)
            if clock.spent():
                yield
                clock.start()
        for line in have.lines if needed else ():
            if line.startswith(b"f"):
                entry = parse(line)
                for name, offset, length in pieces(entry):
                    if name in needed:
                        found[name] = (entry.path, offset, length)
            if clock.spent():
                yield
                clock.start()
        return found


def all_lines(found: Scan) -> Iterator[bytes]:
    """What is there, with what a snapshot leaves out."""
    if not found.left_out:
        return iter(found.lines)
    return merge(found.lines, found.left_out, key=lambda line: order(parse(line).path))
