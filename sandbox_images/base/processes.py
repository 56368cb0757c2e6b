"""Processes of the sandbox as /proc shows them, and the few kernel calls that Python has no name for."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress

MAX_LOOKS = 50
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


def prctl(option: int, value: int) -> None:
    """Raises OSError."""
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def table() -> dict[int, tuple[int, bool]]:
    """Pid → (parent's pid, is a zombie) of every process that /proc shows."""
    found: dict[int, tuple[int, bool]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            line = os.read(fd, 1024)
        except OSError:
            continue
        finally:
            os.close(fd)
        # the command's name stands in brackets and may hold anything, so fields are counted from the last one
        fields = line[line.rfind(b")") + 2 :].split(None, 2)
        if len(fields) == 3:
            found[int(name)] = (int(fields[1]), fields[0] in (b"Z", b"X"))
    return found


def descendants(roots: set[int], processes: dict[int, tuple[int, bool]]) -> set[int]:
    """Everything below `roots`, without them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in found:
                found.add(pid)
                queue.append(pid)
    return found - roots


def living_below(roots: set[int]) -> set[int]:
    """Everything below `roots` that is no zombie."""
    shown = table()
    return {pid for pid in descendants(roots, shown) if not shown[pid][1]}


def send_signal(pid: int, signum: int) -> None:
    """No error when the process is gone."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_all(find: Callable[[], set[int]]) -> set[int]:
    """Kill all that `find` finds, and what those fork meanwhile; who they were.

    All are stopped first, those too that appear between two looks: only when nothing moves any more is anything killed,
    since each process that dies makes room for another fork.
    """
    stopped: set[int] = set()
    for _ in range(MAX_LOOKS):
        found = find()
        for pid in found - stopped:
            send_signal(pid, signal.SIGSTOP)
        if found <= stopped:
            break
        stopped |= found
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)
    return stopped


def become_child(*, session: bool) -> None:
    """What every process of ours does right after its fork: die with the worker, be the first that memory pressure takes."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if session:
        os.setsid()
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, b"1000")
        os.close(fd)
    except OSError:
        pass
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor from 3 on that is not in `keep`."""
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = max(low, fd + 1)
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def describe_end(status: int) -> tuple[int | None, str | None]:
    """(exit code, name of the signal) of a wait status; one of them is None."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return None, signal.Signals(number).name
        except ValueError:
            return None, f"signal {number}"
    return os.WEXITSTATUS(status), None
