"""Workspaces as file systems of a fixed size: an ext4 image, sparse in the state folder, on a loop device.

The only limit on ext4 hosts that no writer gets past, in bytes or in files. Needs root, loop devices and mkfs.ext4. Only
the server and the kernel touch an image; the sandbox has the file system in it, never the device. All of it blocks.

Devices are found by what they hold (/sys/block), never remembered: after a reboot the same number may hold another image.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
BYTES_A_FILE, FEWEST_FILES = 4096, 1024  # as the worker counts: one file or folder for each 4 KiB of the disk limit
MOUNT_OPTIONS = "discard"  # what is deleted goes back to the host
_INODE, _JOURNAL, _SLACK = 256, 4 * MIB, 6 * MIB  # the image is larger than what it must hold, by less than 1 in 10
_TEMPLATES = 8  # sizes whose empty image is kept
_LOOP_CONFIGURE, _LOOP_CLEAR, _LOOP_FREE = 0x4C0A, 0x4C01, 0x4C82
_DIRECT_IO = 16  # no second copy of each page in memory
_TRIES = 32  # others take loop devices too
_TRIAL, _MOUNTED, _DELETED = "trial", "mounted", " (deleted)"
_NOSUID_NODEV_NOATIME = 0x2 | 0x4 | 0x400
_DETACH = 2
_libc = ctypes.CDLL(None, use_errno=True)


class Unusable(Exception):  # noqa: N818 - reads as the state it names
    """Loop images can't be used here. The message says why, for the operator."""


def files_within(disk_mb: int) -> int:
    """How many files and folders a workspace of that size may hold."""
    return max(FEWEST_FILES, disk_mb * MIB // BYTES_A_FILE)


class LoopDisks:
    """`folder` holds the images, one a workspace, and is the caller's own. `owner`: the user whose the root folder of each is.

    `templates`: a folder for empty images, when it is not one in `folder`.
    """

    def __init__(self, folder: Path, owner: int, templates: Path | None = None) -> None:
        self._folder, self._owner = folder, owner
        self._templates = templates or folder / "empty"

    def image(self, workspace_id: str) -> Path:
        return self._folder / f"{workspace_id}.ext4"

    def _half(self, workspace_id: str) -> Path:
        return self._folder / f"{workspace_id}.new"

    def workspace_ids(self) -> set[str]:
        """Of all there is anything of: an image, half of one, or the device of one that was deleted without it."""
        found = {path.stem for pattern in ("*.ext4", "*.new") for path in self._folder.glob(pattern)}
        start, end = f"{self._folder.resolve()}/", f".ext4{_DELETED}"
        for _, held in _held():
            if held.startswith(start) and held.endswith(end) and "/" not in (name := held[len(start) : -len(end)]):
                found.add(name)
        return found

    def check(self) -> None:
        """Make one, mount it, write into it, take it away. Raises Unusable."""
        if os.geteuid() != 0:
            raise Unusable("the server is not root")
        if shutil.which("mkfs.ext4") is None or shutil.which("debugfs") is None:
            raise Unusable("there is no mkfs.ext4: install e2fsprogs")
        if not os.access("/dev/loop-control", os.W_OK):
            raise Unusable("there are no loop devices here")
        try:
            self._templates.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._end_trials()
            place = Path(tempfile.mkdtemp(prefix=f"{_TRIAL}-{os.getpid()}-", dir=self._folder))
            trial, target = LoopDisks(place, self._owner, self._templates), place / _MOUNTED
            try:
                target.mkdir()
                trial.create(_TRIAL, 1)
                trial.mount(_TRIAL, target)
                (target / "written").write_bytes(b"x")
            finally:
                _end_trial(place)
        except (OSError, subprocess.SubprocessError) as problem:
            raise Unusable(f"a loop device can't be used here ({type(problem).__name__})") from problem

    def _end_trials(self) -> None:
        """Those of processes that died in the middle of one. Raises OSError."""
        for place in self._folder.glob(f"{_TRIAL}-*"):
            number = place.name.split("-")[1]
            if number == str(os.getpid()) or not Path("/proc", number).exists():
                _end_trial(place)

    def create(self, workspace_id: str, disk_mb: int) -> None:
        """An empty image that holds `disk_mb` MiB. Raises OSError, SubprocessError."""
        half = self._half(workspace_id)
        half.unlink(missing_ok=True)
        _copy_sparse(self._template(disk_mb), half)
        half.replace(self.image(workspace_id))

    def _template(self, disk_mb: int) -> Path:
        self._templates.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = self._templates / str(disk_mb)
        if made.exists():
            return made
        old = sorted(self._templates.iterdir(), key=lambda path: path.stat().st_mtime)
        for path in old[: max(0, len(old) - _TEMPLATES + 1)]:
            path.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self._templates)
        files = files_within(disk_mb) + 16
        os.truncate(descriptor, disk_mb * MIB + files * _INODE + disk_mb * MIB // 64 + _JOURNAL + _SLACK)
        os.close(descriptor)
        options = f"lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner={self._owner}:{self._owner}"
        shape = ["-O", "^resize_inode", "-J", "size=4", "-b", "4096", "-N", str(files), "-m", "0", "-E", options]
        for command in (["mkfs.ext4", "-q", "-F", *shape, name], ["debugfs", "-w", "-R", "rmdir lost+found", name]):
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        return Path(name).replace(made)

    # -- devices

    def attach(self, workspace_id: str) -> str:
        """The device of the image, such as /dev/loop7; a new one when it has none. Raises OSError."""
        held = devices(self.image(workspace_id))
        return held[0] if held else _attach(self.image(workspace_id))

    def mount(self, workspace_id: str, target: Path) -> None:
        """Raises OSError."""
        device = self.attach(workspace_id)
        arguments = (os.fsencode(device), os.fsencode(target), b"ext4", _NOSUID_NODEV_NOATIME, MOUNT_OPTIONS.encode())
        if _libc.mount(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "mount")

    def delete(self, workspace_id: str) -> None:
        """Image and device. What is still mounted goes with its mount. No error when there is none."""
        image = self.image(workspace_id)
        for device in (*devices(image), *devices(image, deleted=True)):
            with contextlib.suppress(OSError), Path(device).open("rb") as opened:
                fcntl.ioctl(opened, _LOOP_CLEAR)
        for file in (image, self._half(workspace_id)):
            file.unlink(missing_ok=True)


def _end_trial(place: Path) -> None:
    unmount(place / _MOUNTED)
    LoopDisks(place, 0).delete(_TRIAL)
    shutil.rmtree(place)


def unmount(target: Path) -> None:
    """At once, though something may still look at it. No error when nothing is mounted there."""
    while _libc.umount2(os.fsencode(target), _DETACH) == 0:
        pass


def devices(image: Path, *, deleted: bool = False) -> list[str]:
    """The loop devices that hold this very file now; `deleted`: those that hold one of this name which was deleted."""
    wanted = str(image.resolve()) + (_DELETED if deleted else "")
    return [device for device, held in _held() if held == wanted]


def _held() -> Iterator[tuple[str, str]]:
    """Each loop device with what it holds, as the kernel names it."""
    for note in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            yield f"/dev/{note.parent.parent.name}", note.read_text().rstrip("\n")


def _attach(image: Path) -> str:
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_TRIES):
            with Path("/dev/loop-control").open("rb") as control:
                number = fcntl.ioctl(control, _LOOP_FREE)
            device = f"/dev/loop{number}"
            info = bytearray(232)  # struct loop_info64, all zero but its flags
            struct.pack_into("=I", info, 52, _DIRECT_IO)
            request = struct.pack("=II", backing, 4096) + bytes(info) + bytes(64)
            try:
                opened = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.ioctl(opened, _LOOP_CONFIGURE, request)
                return device
            except OSError as taken:
                if taken.errno != errno.EBUSY:
                    raise
            finally:
                os.close(opened)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "no loop device is free")


def _copy_sparse(source: Path, target: Path) -> None:
    with source.open("rb") as whole, target.open("xb") as copy:
        size = os.fstat(whole.fileno()).st_size
        os.ftruncate(copy.fileno(), size)
        place = 0
        while place < size:
            try:
                place = os.lseek(whole.fileno(), place, os.SEEK_DATA)
            except OSError as none_left:
                if none_left.errno == errno.ENXIO:
                    return
                raise
            end = os.lseek(whole.fileno(), place, os.SEEK_HOLE)
            while place < end:
                place += os.copy_file_range(whole.fileno(), copy.fileno(), end - place, place, place)
