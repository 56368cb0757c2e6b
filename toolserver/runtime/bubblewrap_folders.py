"""The folders of bubblewrap sessions in the server's state: workspace, user, and the processes to end after a crash.

    <state>/bubblewrap/sessions/<session>/workspace/     bound at /workspace
    <state>/bubblewrap/sessions/<session>/users/         passwd and group of the sandbox
    <state>/bubblewrap/processes/<sandbox>               "pid start-time" of its first process, and the session's id
    <state>/bubblewrap/etc-none, etc-open                /etc without and with a network
Blocking: call it in a thread.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.host_process import HostProcess
from toolserver.runtime.sandbox_etc import make_etc, make_users

# ids that no distribution and no container tool gives out; a user namespace that maps fewer gets ids of its own range
_FIRST_UID, _FIRST_SMALL_UID = 1_900_000_000, 40_000
_UIDS, _SHARES = 20_000, 5_000  # ids of one server; servers of one host whose state is elsewhere have other ones
_DELETE_S = 120


class SessionFolders:
    """`root`: the server runs as root, so each session gets a user of its own, on whom its process limit is counted."""

    def __init__(self, state_dir: Path, *, root: bool, sandbox_uid: int) -> None:
        self._home = state_dir / "bubblewrap"
        self._sessions, self._processes = self._home / "sessions", self._home / "processes"
        self._root, self._sandbox_uid = root, sandbox_uid

    def prepare(self) -> None:
        """Raises OSError."""
        for folder in (self._home, self._sessions, self._processes):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the mounts are made before the user is changed
        for network in (False, True):
            folder = self.etc(network=network)
            if folder.exists():
                shutil.rmtree(folder)
            make_etc(folder, network=network)

    def etc(self, *, network: bool) -> Path:
        return self._home / ("etc-open" if network else "etc-none")

    def session(self, session_id: str) -> Path:
        return self._sessions / session_id

    def create(self, session_id: str) -> None:
        """The session's folder, user and workspace; nothing changes when it has them. Raises OSError."""
        folder = self.session(session_id)
        workspace, users = folder / "workspace", folder / "users"
        if workspace.is_dir():
            return
        uid = self._free_uid() if self._root else None
        users.mkdir(parents=True, exist_ok=True)
        make_users(users, self._sandbox_uid if uid is None else uid)
        half = folder / "new"
        half.mkdir(exist_ok=True)
        half.chmod(0o755)  # bwrap enters it without the right to pass by modes; the folders above are closed
        if uid is not None:
            os.chown(half, uid, uid)
        half.replace(workspace)

    def uid(self, session_id: str) -> int | None:
        """The host's user of the session; None when the server is not root. Raises FileNotFoundError."""
        owner = (self.session(session_id) / "workspace").stat().st_uid
        return owner if self._root else None

    def _free_uid(self) -> int:
        taken = set()
        for workspace in self._sessions.glob("*/workspace"):
            taken.add(workspace.stat().st_uid)
        share = int.from_bytes(hashlib.sha256(os.fsencode(self._home.resolve())).digest()[:4], "big") % _SHARES
        if _maps(_FIRST_UID + _SHARES * _UIDS):
            first, turn = _FIRST_UID + share * _UIDS, 0
        else:  # one range for all: begin at different places
            first, turn = _FIRST_SMALL_UID, share * (_UIDS // _SHARES)
        return next(uid for n in range(_UIDS) if (uid := first + (turn + n) % _UIDS) not in taken)

    def delete(self, session_id: str) -> None:
        """Raises RuntimeUnavailable when something stays."""
        folder = self.session(session_id)
        for prepare in ([], ["chmod", "-R", "u+rwX", "--"]):
            if not folder.exists():
                return
            if prepare:
                _run([*prepare, str(folder)])
            _run(["rm", "-rf", "--one-file-system", "--", str(folder)])  # rm knows no limit of depth
        if folder.exists():
            raise RuntimeUnavailable("A workspace could not be deleted whole.")

    def session_ids(self) -> list[str]:
        return [folder.name for folder in self._sessions.iterdir()] if self._sessions.is_dir() else []

    # -- processes that a killed server may leave

    def remember(self, sandbox_id: str, session_id: str, pid: int) -> None:
        process = HostProcess.running(pid)
        if process is not None:
            (self._processes / sandbox_id).write_text(f"{process.dump()}{session_id}\n")

    def forget(self, sandbox_id: str) -> None:
        (self._processes / sandbox_id).unlink(missing_ok=True)

    def end_left_over(self, keep_sessions: frozenset[str], running: frozenset[str]) -> int:
        """Kill the sandboxes of an earlier server that belong to no session kept; how many were there."""
        ended = sum(process.kill() for process in self._starting(keep_sessions))
        for note in list(self._processes.iterdir()) if self._processes.is_dir() else ():
            lines = note.read_text().splitlines()
            process = HostProcess.load(lines[0]) if lines else None
            if note.name in running or (len(lines) > 1 and lines[1] in keep_sessions):
                continue
            ended += process is not None and process.kill()
            note.unlink(missing_ok=True)
        return ended

    def _starting(self, keep_sessions: frozenset[str]) -> list[HostProcess]:
        """Sandboxes of a server that was killed before it noted them, first processes first.

        Such a first process can wait for ever for a bwrap that has died. Both still name the session's folder.
        """
        prefix = os.fsencode(self._sessions) + b"/"
        found: list[HostProcess | None] = []
        for entry in Path("/proc").iterdir():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                names = {
                    os.fsdecode(part.removeprefix(prefix).split(b"/")[0]) for part in line if part.startswith(prefix)
                }
                if not names or names & keep_sessions or Path(os.fsdecode(line[0])).name != "bwrap":
                    continue
                children = (entry / "task" / entry.name / "children").read_text().split()
            except OSError:
                continue  # it ended meanwhile, or is not ours
            found += [HostProcess.running(int(child)) for child in children]
            found.append(HostProcess.running(int(entry.name)))
        return [process for process in dict.fromkeys(found) if process is not None]


def _maps(uid: int) -> bool:
    """Whether this process's user namespace has `uid`."""
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, length = (int(part) for part in line.split())
        if inside <= uid < inside + length:
            return True
    return False


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_DELETE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise RuntimeUnavailable("A workspace could not be deleted.") from problem
