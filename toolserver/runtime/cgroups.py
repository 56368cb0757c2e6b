"""Control groups of sandboxes that no engine makes: one each, below the server's own, with memory, CPU and process limits.

Version 1, where each controller has a tree of its own, and version 2, where there is one, and mixtures. Only where the
server may write there, which means root. All of it blocks, for well under a millisecond.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from toolserver.runtime.base import Limits

MIB = 1 << 20
CONTROLLERS = ("memory", "cpu", "pids")
_PERIOD_US = 100_000
_GONE_S = 2.0  # for the kernel to let go of a group whose processes have ended
_DELEGATE = "run the server as a service of its own (systemd: Delegate=yes)"


@dataclass(frozen=True)
class _Tree:
    """A mounted hierarchy: what it controls here, and the server's own group in it."""

    version: int
    controllers: frozenset[str]
    own: Path


class Cgroups:
    """`name` is the server's own. `problem`: why sandboxes can't have groups here, None when they can. `system` is the root of the host's files."""

    def __init__(self, name: str, system: Path = Path("/")) -> None:
        self._name, self._system = f"toolcrib-{name}", system
        self._homes: dict[str, tuple[int, Path]] = {}  # controller to version and folder of this server's groups
        try:
            self.problem = self._find()
        except (OSError, ValueError, IndexError):
            self.problem = "the control groups of this host can't be read"

    def _find(self) -> str | None:
        for tree in self._trees():
            for name in tree.controllers.intersection(CONTROLLERS):
                if os.access(tree.own, os.W_OK):
                    self._homes[name] = (tree.version, tree.own / self._name)
        missing = [name for name in CONTROLLERS if name not in self._homes]
        if missing:
            return f"the server may not make control groups for {', '.join(missing)} here"
        unified = next((home for version, home in self._homes.values() if version == 2), None)
        return None if unified is None else self._can_delegate(unified.parent)

    def _trees(self) -> list[_Tree]:
        """From the process's own memberships and mounts, as proc(5) and cgroups(7) say."""
        member: dict[str, str] = {}
        for line in (self._system / "proc/self/cgroup").read_text().splitlines():
            _, joined, path = line.split(":", 2)
            for name in joined.split(","):
                member[name] = path
        trees = []
        for line in (self._system / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            root, place = before.split()[3:5]
            kind, _, options = after.split()[:3]
            if kind not in ("cgroup", "cgroup2"):
                continue
            names = {""} if kind == "cgroup2" else set(options.split(",")) & set(CONTROLLERS)
            if not names:
                continue
            path = member.get(min(names), "/")
            below = path.removeprefix(root) if root != "/" else path
            own = self._system / place.lstrip("/") / below.lstrip("/")
            if kind == "cgroup2":
                names = set((own / "cgroup.controllers").read_text().split())
            trees.append(_Tree(2 if kind == "cgroup2" else 1, frozenset(names), own))
        return trees

    def _can_delegate(self, own: Path) -> str | None:
        """Version 2: a group with processes in it can't share out to groups below it, unless it is the root."""
        missing = set(CONTROLLERS) - set((own / "cgroup.subtree_control").read_text().split())
        members = set((own / "cgroup.procs").read_text().split())
        if missing and (own / "cgroup.type").exists() and members - {str(os.getpid())}:
            return f"the server shares its control group with other processes; {_DELEGATE}"
        return None

    # -- the groups

    def create(self, sandbox_id: str, limits: Limits) -> None:
        """Raises OSError; then nothing is left of it."""
        try:
            for version, home in dict.fromkeys(self._homes.values()):
                home.mkdir(exist_ok=True)
                if version == 2:
                    self._delegate(home)
            for name, (version, home) in self._homes.items():
                group = home / sandbox_id
                group.mkdir(exist_ok=True)
                _set(group, name, version, limits)
        except OSError:
            self.remove(sandbox_id)
            raise

    def _delegate(self, home: Path) -> None:
        mine = [name for name, (version, _) in self._homes.items() if version == 2]
        wanted = " ".join(f"+{name}" for name in mine)
        for group in (home.parent, home):
            control = group / "cgroup.subtree_control"
            if not set(mine) - set(control.read_text().split()):
                continue
            try:
                control.write_text(wanted)
            except OSError as busy:
                if busy.errno != errno.EBUSY or group is home:
                    raise
                leaf = group / f"{self._name}-server"
                leaf.mkdir(exist_ok=True)
                (leaf / "cgroup.procs").write_text(str(os.getpid()))
                control.write_text(wanted)

    def join(self, sandbox_id: str, pid: int) -> None:
        """Put a process in, which must not have begun its work yet. No error when it has ended. Raises OSError."""
        for _, home in dict.fromkeys(self._homes.values()):
            with contextlib.suppress(ProcessLookupError):
                _write(home / sandbox_id / "cgroup.procs", str(pid))

    def counters(self, sandbox_id: str) -> list[tuple[Path, str]]:
        """The folders with the group's counters of memory and processes, and where a sandbox expects each, as in a container."""
        (version, home), (other, processes) = self._homes["memory"], self._homes["pids"]
        if version == 1 and other == 1:
            return [(home / sandbox_id, "/sys/fs/cgroup/memory"), (processes / sandbox_id, "/sys/fs/cgroup/pids")]
        # in version 2 one folder has both; of two versions beside each other, one place can't hold the other's
        return [(home / sandbox_id, "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup")]

    def oom_kills(self, sandbox_id: str) -> int:
        """How many of its processes were ended for want of memory; 0 when it is gone."""
        version, home = self._homes["memory"]
        events = home / sandbox_id / ("memory.oom_control" if version == 1 else "memory.events")
        with contextlib.suppress(OSError, ValueError):
            for line in events.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self, sandbox_id: str) -> None:
        """With all that still runs in it. No error when it is gone, or will not go: `sandbox_ids` names it then."""
        for _, home in self._homes.values():
            _remove(home / sandbox_id)

    def sandbox_ids(self) -> set[str]:
        """Of all groups of this server that there are."""
        found = set()
        for _, home in dict.fromkeys(self._homes.values()):
            with contextlib.suppress(FileNotFoundError):
                found |= {group.name for group in home.iterdir() if group.is_dir()}
        return found

    def close(self) -> None:
        for _, home in dict.fromkeys(self._homes.values()):
            with contextlib.suppress(OSError):  # not while a sandbox lives on
                home.rmdir()


def _set(group: Path, controller: str, version: int, limits: Limits) -> None:
    memory, quota = str(limits.memory_mb * MIB), str(int(limits.cpus * _PERIOD_US))
    pids = str(limits.pids)
    if version == 1:
        lines = {
            "memory": {
                "memory.limit_in_bytes": memory,
                "memory.swappiness": "0",
                "memory.memsw.limit_in_bytes": memory,
            },
            "cpu": {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": quota},
            "pids": {"pids.max": pids},
        }[controller]
    else:
        lines = {
            "memory": {"memory.max": memory, "memory.swap.max": "0"},
            "cpu": {"cpu.max": f"{quota} {_PERIOD_US}"},
            "pids": {"pids.max": pids},
        }[controller]
    for name, value in lines.items():
        if "swap" in name or "memsw" in name:
            with contextlib.suppress(FileNotFoundError):  # a kernel that does not count swap
                _write(group / name, value)
        else:
            _write(group / name, value)


def _write(place: Path, value: str) -> None:
    """Never makes the file: in a control group all there is is there."""
    descriptor = os.open(place, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _remove(group: Path) -> None:
    until = time.monotonic() + _GONE_S
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                return
            with contextlib.suppress(OSError, ValueError):
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.005)
