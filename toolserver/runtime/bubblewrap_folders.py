"""The folders of bubblewrap workspaces in the server's state, and the processes to find again after a crash.

    <state>/bubblewrap/workspaces/<workspace>/workspace/   bound at /workspace
    <state>/bubblewrap/workspaces/<workspace>/users/       passwd and group of its sandboxes
    <state>/bubblewrap/sandboxes/<sandbox>/in, out, err    named pipes
    <state>/bubblewrap/sandboxes/<sandbox>/processes       "pid start-time" of its first process, and of its monitor
    <state>/bubblewrap/doors/<sandbox>/                    its doors to the egress proxy, which makes them
    <state>/bubblewrap/proxy/                              passwd and group of the egress proxy
    <state>/bubblewrap/etc-none-…, etc-open-…              /etc of sandboxes and of the egress proxy, named by what is in it
Blocking: call it in a thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import checked_id, is_id
from toolserver.runtime.bubblewrap_sandbox import Processes
from toolserver.runtime.fifo_stream import make_fifos
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.loop_disk import LoopDisks, unmount
from toolserver.runtime.sandbox_etc import make_etc, make_users

# ids that no distribution and no container tool gives out; a user namespace that maps fewer gets ids of its own range
_FIRST_UID, _FIRST_SMALL_UID = 1_900_000_000, 40_000
_UIDS, _SHARES = 20_000, 5_000  # ids of one server; servers of one host whose state is elsewhere have other ones
_DELETE_S, _END_S = 120, 10.0
_HALF_MADE_S = 60.0
_OF_VERSION_1 = ("sessions", "processes", "etc-none", "etc-open")  # of the store's schema: what its sessions left


class BubblewrapFolders:
    """`root`: the server runs as root, so each workspace gets a user of its own, on whom its process limit is counted."""

    def __init__(self, state_dir: Path, *, root: bool, sandbox_uid: int) -> None:
        self.fixed_size = False  # true: new workspaces are file systems of their own
        self._home = state_dir / "bubblewrap"
        self.disks = LoopDisks(self._home / "disks", 0)
        self._workspaces, self._sandboxes = self._home / "workspaces", self._home / "sandboxes"
        self.doors, self.proxy_users = self._home / "doors", self._home / "proxy"
        self._etc: dict[bool, Path] = {}
        self._owners = threading.Lock()  # no two workspaces get the same user
        self._root, self._sandbox_uid = root, sandbox_uid

    def prepare(self) -> None:
        """Raises OSError."""
        for folder in (self._home, self._workspaces, self._sandboxes):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the mounts are made before the user is changed
        self._prepare_doors()
        for half in self._home.glob(".etc-*"):  # of a server that was killed meanwhile
            if time.time() - half.lstat().st_mtime > _HALF_MADE_S:
                shutil.rmtree(half, ignore_errors=True)
        for name in _OF_VERSION_1:
            with contextlib.suppress(RuntimeUnavailable):  # it is tried again at the next start
                _remove(self._home / name)
        for network in (False, True):
            self._etc[network] = self._make_etc(network=network)

    def _prepare_doors(self) -> None:
        for folder in (self.doors, self.proxy_users):
            folder.mkdir(exist_ok=True)
        make_users(self.proxy_users, self._sandbox_uid if self.proxy_uid is None else self.proxy_uid)
        self._give_to_proxy(self.doors)

    def _give_to_proxy(self, folder: Path) -> None:
        """It alone makes something there; sandboxes pass through and see no names."""
        folder.chmod(0o711)
        if self.proxy_uid is not None:
            os.chown(folder, self.proxy_uid, self.proxy_uid)

    @property
    def proxy_uid(self) -> int | None:
        """The host's user of the egress proxy, no workspace's; None when the server is not root."""
        if not self._root:
            return None
        first, _ = self._uid_range()
        return first + _UIDS - 1

    def _make_etc(self, *, network: bool) -> Path:
        """What an earlier server made is left as it is: sandboxes that outlived it look at it."""
        name = f"etc-{'open' if network else 'none'}"
        new = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self._home))
        new.rmdir()
        make_etc(new, network=network)
        digest = hashlib.sha256()
        for place in sorted(new.rglob("*")):
            digest.update(os.fsencode(place.relative_to(new)) + b"\0")
            digest.update(place.read_bytes() if place.is_file() else b"")
        folder = self._home / f"{name}-{digest.hexdigest()[:16]}"
        try:
            new.rename(folder)
        except OSError:  # it is there
            shutil.rmtree(new)
        return folder

    def etc(self, *, network: bool) -> Path:
        return self._etc[network]

    def sandbox(self, sandbox_id: str) -> Path:
        return self._sandboxes / checked_id(sandbox_id)

    def workspace(self, workspace_id: str) -> Path:
        return self._workspaces / checked_id(workspace_id)

    def create(self, workspace_id: str, disk_mb: int) -> None:
        """The folder, user and workspace; nothing changes when they are there. Raises OSError, SubprocessError."""
        folder = self.workspace(workspace_id)
        workspace, users = folder / "workspace", folder / "users"
        if workspace.is_dir():
            self.mount(workspace_id)
            return
        if self.fixed_size:
            self.disks.create(workspace_id, disk_mb)
        with self._owners:
            uid = self._free_uid() if self._root else None
            users.mkdir(parents=True, exist_ok=True)
            make_users(users, self._sandbox_uid if uid is None else uid)
            half = folder / "new"
            half.mkdir(exist_ok=True)
            half.chmod(0o755)  # bwrap enters it without the right to pass by modes; the folders above are closed
            if uid is not None:
                os.chown(half, uid, uid)
            half.replace(workspace)
        self.mount(workspace_id)

    def mount(self, workspace_id: str) -> None:
        """Where the workspace is a file system of its own and not in its place, as after a reboot, put it there. Raises OSError."""
        workspace = self.workspace(workspace_id) / "workspace"
        if not self.disks.image(workspace_id).exists() or workspace.is_mount():
            return
        with self._owners:  # a new file system is root's for a moment
            owner = workspace.stat().st_uid
            self.disks.mount(workspace_id, workspace)
            os.chown(workspace, owner, owner)

    def uid(self, workspace_id: str) -> int | None:
        """The host's user of the workspace; None when the server is not root. Raises FileNotFoundError."""
        owner = (self.workspace(workspace_id) / "workspace").stat().st_uid
        return owner if self._root else None

    def _free_uid(self) -> int:
        taken = set()
        for workspace in self._workspaces.glob("*/workspace"):
            taken.add(workspace.stat().st_uid)
        first, turn = self._uid_range()
        most = _UIDS - 1  # the last is the egress proxy's
        return next(uid for n in range(most) if (uid := first + (turn + n) % most) not in taken)

    def _uid_range(self) -> tuple[int, int]:
        """The first id of this server, and which of them to begin with."""
        share = int.from_bytes(hashlib.sha256(os.fsencode(self._home.resolve())).digest()[:4], "big") % _SHARES
        if _maps(_FIRST_UID + _SHARES * _UIDS):
            return _FIRST_UID + share * _UIDS, 0
        return _FIRST_SMALL_UID, share * (_UIDS // _SHARES)  # one range for all: begin at different places

    def delete(self, workspace_id: str) -> None:
        """Raises RuntimeUnavailable when something stays."""
        folder = self.workspace(workspace_id)
        unmount(folder / "workspace")  # also of an image that somebody deleted
        self.disks.delete(workspace_id)
        _remove(folder)

    def workspace_ids(self) -> list[str]:
        found = {folder.name for folder in self._workspaces.iterdir()} if self._workspaces.is_dir() else set()
        return sorted(filter(is_id, found.union(self.disks.workspace_ids())))

    # -- sandboxes, those that a killed server leaves too

    def create_sandbox(self, sandbox_id: str, *, doors: bool) -> tuple[int, int, int]:
        """Its folder and pipes, and a folder for `doors`; the descriptors of its side of the pipes. Raises OSError."""
        folder = self.sandbox(sandbox_id)
        folder.mkdir(mode=0o700)
        if doors:
            (self.doors / sandbox_id).mkdir(exist_ok=True)
            self._give_to_proxy(self.doors / sandbox_id)
        return make_fifos(folder)

    def remember(self, sandbox_id: str, processes: Processes) -> None:
        (self.sandbox(sandbox_id) / "processes").write_text(processes.dump())

    def forget(self, sandbox_id: str) -> None:
        shutil.rmtree(self.doors / checked_id(sandbox_id), ignore_errors=True)
        shutil.rmtree(self.sandbox(sandbox_id), ignore_errors=True)

    def sandbox_ids(self) -> tuple[set[str], set[str]]:
        """All that have a folder or are being started, and those of them that run."""
        places = [folder for folder in (self._sandboxes, self.doors) if folder.is_dir()]
        found = [folder.name for place in places for folder in place.iterdir()]
        known = set(filter(is_id, found))
        running = {name for name in known if (processes := self._noted(name)) is not None and processes.run}
        starting = set(self._starting())
        return starting | known, starting | running

    def end(self, sandbox_id: str) -> None:
        """Kill what runs of a sandbox that an earlier server started, and wait for its end. Raises RuntimeUnavailable."""
        noted = self._noted(sandbox_id)
        found = [*self._starting().get(sandbox_id, ()), *((noted.first, noted.monitor) if noted is not None else ())]
        until = time.monotonic() + _END_S
        while any(process.is_running() for process in found):
            for process in found:
                process.kill()
            if time.monotonic() > until:
                raise RuntimeUnavailable("A sandbox did not end when it was killed.")
            time.sleep(0.005)
        self.forget(sandbox_id)

    def _noted(self, sandbox_id: str) -> Processes | None:
        try:
            return Processes.load((self.sandbox(sandbox_id) / "processes").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _starting(self) -> dict[str, list[HostProcess]]:
        """Processes that are still bwrap, by their sandbox, first processes first: a killed server may not have noted them.

        Such a first process can wait for ever for a bwrap that has died. Both are named after the sandbox. So may whatever
        runs in a sandbox call itself, which is why nothing that is further inside counts.
        """
        prefix, depth = os.fsencode(self._workspaces) + b"/", len(_numbers(Path("/proc/self")))
        found: dict[str, list[HostProcess]] = {}
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                sandbox_id, _, program = os.fsdecode(line[0]).rpartition("/") if line else ("", "", "")
                if program != "bwrap" or not is_id(sandbox_id) or not any(part.startswith(prefix) for part in line):
                    continue
                numbers = _numbers(entry)
                if len(numbers) != depth and (len(numbers) != depth + 1 or numbers[-1] != "1"):
                    continue
                children = (entry / "task" / entry.name / "children").read_text().split()
            except OSError:
                continue  # it ended meanwhile, or is not ours
            pids = (*(int(child) for child in children), int(entry.name))
            found.setdefault(sandbox_id, []).extend(
                process for pid in pids if (process := HostProcess.running(pid)) is not None
            )
        return found


def _maps(uid: int) -> bool:
    """Whether this process's user namespace has `uid`."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = (int(part) for part in line.split())
        if inside <= uid < inside + length:
            return True
    return False


def _numbers(process: Path) -> list[str]:
    """Of a process, one in each process namespace that it is in, from that of /proc inwards. Raises OSError."""
    for line in (process / "status").read_text("utf-8", "replace").splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return []


def _remove(folder: Path) -> None:
    """Raises RuntimeUnavailable when something stays."""
    for prepare in ([], ["chmod", "-R", "u+rwX", "--"]):
        if not folder.exists():
            return
        if prepare:
            _run([*prepare, str(folder)])
        _run(["rm", "-rf", "--one-file-system", "--", str(folder)])  # rm knows no limit of depth
    if folder.exists():
        raise RuntimeUnavailable("A workspace could not be deleted whole.")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_DELETE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise RuntimeUnavailable("A workspace could not be deleted.") from problem
