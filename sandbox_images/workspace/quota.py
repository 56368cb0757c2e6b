"""The workspace's disk quota, kept by accounting: the tree is scanned after each call and, while something runs, now and then."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator
from contextlib import suppress

from sandbox_images.base.annotations import TYPE_CHECKING, Protocol
from sandbox_images.base.beneath import Workspace
from sandbox_images.base.event_loop import Loop
from sandbox_images.workspace import workspace_scan

if TYPE_CHECKING:
    from sandbox_images.workspace.calls import Ending

FIRST_LOOK_S, SHARE_OF_TIME = 0.2, 20  # a scan of 10 ms is made every 200 ms at most
UNLIMITED = 1 << 50
FULL_BYTES = 64 << 10  # what a disk may have left that is called full
BYTES_A_FILE, FEWEST_FILES = 4096, 1024  # a file or folder for each 4 KiB of the quota, as a disk of that size has


class Writer(Protocol):
    """Something that runs and may fill the disk."""

    def over_quota(self) -> None:
        """Asked to stop. May come more than once."""


class Quota:
    def __init__(self, loop: Loop, workspace: Workspace) -> None:
        self._loop, self._workspace = loop, workspace
        self.limit_bytes = self.limit_files = UNLIMITED
        self.snapshot = workspace_scan.Snapshot()
        self.stale = True  # something may have changed that no scan has seen
        self._writers: dict[Writer, workspace_scan.Snapshot] = {}
        self._looking, self._interval = False, FIRST_LOOK_S

    def limit(self, limit_bytes: int) -> None:
        """From now on the workspace may hold so many bytes, and files and folders in proportion."""
        self.limit_bytes, self.limit_files = limit_bytes, max(FEWEST_FILES, limit_bytes // BYTES_A_FILE)

    def refresh(self) -> Generator[None, None, None]:
        """Scan in slices; then `snapshot` is new."""
        self.stale = bool(self._writers)
        started = time.monotonic()
        self.snapshot = yield from workspace_scan.scan(self._workspace)
        self._interval = max(FIRST_LOOK_S, SHARE_OF_TIME * (time.monotonic() - started))

    def exceeded(self, before: workspace_scan.Snapshot) -> bool:
        """Whether the workspace is too large and has grown: what was too large before may shrink in peace."""
        now = self.snapshot
        return now.bytes > max(self.limit_bytes, before.bytes) or _entries(now) > max(
            self.limit_files, _entries(before)
        )

    def left(self) -> int:
        return max(0, self.limit_bytes - self.snapshot.bytes)

    def message(self) -> str:
        if _entries(self.snapshot) > self.limit_files:
            return (
                f"The workspace holds {_entries(self.snapshot)} files and folders, its disk quota allows {self.limit_files}. "
                "Delete some, then try again."
            )
        used, limit = self.snapshot.bytes / (1 << 20), self.limit_bytes / (1 << 20)
        return f"The workspace holds {used:.1f} MiB, its disk quota is {limit:.0f} MiB. Delete files, then try again."

    def explain(self, ending: Ending, what: str, *, file_too_large: bool) -> None:
        """Make a `disk_full` say which bound it was: of one file, of a disk that has no room left, or of the workspace."""
        limit = self.file_size_limits()[0]
        full = self.full_disks()
        if file_too_large and limit:
            ending.limits_hit.add("file_size")
            told = "" if limit == resource.RLIM_INFINITY else f" than {limit / (1 << 20):.0f} MiB"
            ending.message = f"A file would have become larger{told}, the most that one may hold here. {what}"
        elif full and not file_too_large:
            ending.message = f"{' and '.join(full)} has no room left. {what}"

    def full_disks(self) -> list[str]:
        """Those of the places to write to that have no room left, whoever has filled them."""
        found = []
        for place, name in ((self._workspace.fd, "The workspace's disk"), ("/tmp", "/tmp"), ("/dev/shm", "/dev/shm")):
            with suppress(OSError):
                state = os.statvfs(place)
                no_files = state.f_files and not state.f_favail
                if no_files or (state.f_blocks and state.f_bavail * state.f_frsize < FULL_BYTES):
                    found.append(name)
        return found

    def file_size_limits(self) -> tuple[int, int]:
        """(soft, hard) RLIMIT_FSIZE of processes started now: none may write once the quota is used up."""
        if self.limit_bytes >= UNLIMITED:
            return resource.RLIM_INFINITY, resource.RLIM_INFINITY
        return (self.limit_bytes if self.left() else 0), self.limit_bytes

    def watch(self, writer: Writer) -> None:
        """Look at the workspace now and then until `unwatch`, and tell `writer` when it has grown too large."""
        self._writers[writer] = self.snapshot
        if not self._looking:
            self._looking = True
            self._loop.call_later(self._interval, self._look)

    def unwatch(self, writer: Writer) -> None:
        self._writers.pop(writer, None)
        self.stale = True

    def _look(self) -> None:
        if self._writers and self.limit_bytes < UNLIMITED:
            self._loop.start(self._check())
        else:
            self._looking = False

    def _check(self) -> Generator[None, None, None]:
        yield from self.refresh()
        for writer, before in list(self._writers.items()):
            if self.exceeded(before):
                writer.over_quota()
        self._loop.call_later(self._interval, self._look)


def _entries(snapshot: workspace_scan.Snapshot) -> int:
    return snapshot.files + snapshot.folders
