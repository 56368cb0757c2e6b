"""What a sandbox may do under bubblewrap: one pure function from a spec to a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolserver.runtime.base import EGRESS_FOLDER, SandboxSpec
from toolserver.runtime.hardening import (
    DOORS_FOLDER,
    MIB,
    OPEN_FILES,
    SANDBOX_UID,
    WORKSPACE,
    shm_mb,
    thread_env,
    tmp_mb,
)
from toolserver.runtime.interpreter import Interpreter

IMAGES_IN_SANDBOX = "/opt/toolcrib/sandbox_images"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
MAPPED_MB = 1024  # address space beyond the memory limit, for program files and reserves that are never touched
FONTS = "/usr/share/fonts"
_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libexec")
_SHARE = ("awk", "ca-certificates", "file", "git-core", "i18n", "mime", "misc", "perl", "perl5", "terminfo", "zoneinfo")
_ENV = {
    "HOME": "/tmp",  # noqa: S108 - inside the sandbox
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "MPLCONFIGDIR": "/tmp/matplotlib",  # noqa: S108
    "GIT_PAGER": "cat",
    "PAGER": "cat",
    "TERM": "dumb",
    "SSL_CERT_FILE": CERTIFICATES,
}


@dataclass(frozen=True)
class Place:
    """What the host gives to a sandbox. `uid`: the host's user that it runs as when the server is root, else None.

    `open_files`: no more than the server itself may have open, which it can't raise. `etc` becomes /etc, `users` holds its passwd and group; `workspace` None when the spec wants none.
    """

    bwrap: str
    version: tuple[int, ...]
    images: Path
    interpreter: Interpreter
    etc: Path
    users: Path
    workspace: Path | None
    uid: int | None
    open_files: int = OPEN_FILES
    counters: Sequence[tuple[Path, str]] = ()  # folders of its cgroup's counters, and where it sees them
    doors: Path | None = None  # its doors to the egress proxy; for the proxy those of all sandboxes, which it makes


def command_line(
    spec: SandboxSpec, place: Place, *, seccomp_fd: int | None, info_fd: int | None, block_fd: int | None = None
) -> list[str]:
    """The whole command. Descriptors must be inherited; bwrap writes the first process's id to `info_fd`.

    The command in the sandbox begins once there is something to read from `block_fd`.
    """
    isolation = ["--unshare-net", "--as-pid-1"]
    return _line(spec, place, [*isolation, *_own(spec, place)], _descriptors(seccomp_fd, info_fd, block_fd))


def egress_command_line(
    spec: SandboxSpec, place: Place, *, seccomp_fd: int | None, info_fd: int | None, block_fd: int | None
) -> list[str]:
    """As `command_line`, for the egress proxy: it has the host's network, and ends with the server."""
    files = [*_own(spec, replace(place, doors=None)), "--bind", str(place.doors), DOORS_FOLDER]
    arguments = ["--as-pid-1", "--die-with-parent", *files]
    return _line(spec, place, arguments, _descriptors(seccomp_fd, info_fd, block_fd))


def _descriptors(seccomp_fd: int | None, info_fd: int | None, block_fd: int | None) -> list[str]:
    told = (("--seccomp", seccomp_fd), ("--info-fd", info_fd), ("--block-fd", block_fd))
    return [part for option, number in told if number is not None for part in (option, str(number))]


def _line(spec: SandboxSpec, place: Place, own: list[str], descriptors: list[str]) -> list[str]:
    own_user = [] if place.uid is not None else _own_user_namespace(place)
    namespaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    process = ["--new-session", "--clearenv", "--cap-drop", "ALL"]
    if place.uid is not None:  # for setpriv alone, which gives them away before the command starts
        for name in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            process += ["--cap-add", name]
    files = [*_system(), *own, "--remount-ro", "/dev", "--remount-ro", "/"]
    home = WORKSPACE if place.workspace is not None else "/tmp"  # noqa: S108
    inside = [*_environment(spec, place), "--chdir", home, "--"]
    return [
        *(place.bwrap, *own_user, *namespaces, *process, *files, *descriptors, *inside),
        *(*_drop_user(place), *_limits(spec, place), *spec.command),
    ]


def loader_cache_command(bwrap: str, interpreter: Interpreter, etc: Path, *, root: bool) -> list[str] | None:
    """Writes `etc`/ld.so.cache, seen from inside, so that the interpreter's shared library is found there. None: no need."""
    if interpreter.library is None:
        return None
    user = [] if root else ["--unshare-user"]
    files = [*_system(), *_bound(interpreter.binds), "--bind", str(etc), "/etc"]
    return [bwrap, *user, "--unshare-pid", "--unshare-net", *files, "--", "ldconfig", "-X", interpreter.library]


def _own_user_namespace(place: Place) -> list[str]:
    mapped = ["--unshare-user", "--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID)]
    return [*mapped, "--disable-userns"] if place.version >= (0, 8) else mapped


def _system() -> list[str]:
    """Programs and libraries of the host, read-only; nothing of /home, /root, /var, /srv, /usr/local, fonts."""
    arguments = ["--dir", "/usr", "--dir", "/usr/share"]  # parents that bwrap makes by itself are closed to other users
    for name in _USR:
        arguments += ["--ro-bind-try", f"/usr/{name}", f"/usr/{name}"]
    for name in _SHARE:
        arguments += ["--ro-bind-try", f"/usr/share/{name}", f"/usr/share/{name}"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        top = Path("/", name)
        if top.is_symlink():
            arguments += ["--symlink", f"usr/{name}", str(top)]
        else:
            arguments += ["--ro-bind-try", str(top), str(top)]
    return [*arguments, "--proc", "/proc", "--dev", "/dev"]


def _own(spec: SandboxSpec, place: Place) -> list[str]:
    arguments = ["--ro-bind", str(place.etc), "/etc"]
    for name in ("passwd", "group"):
        arguments += ["--ro-bind", str(place.users / name), f"/etc/{name}"]
    arguments += _bound(place.interpreter.binds)
    arguments += _bound(((str(place.images), IMAGES_IN_SANDBOX),))
    for size, target in ((tmp_mb(spec.limits), "/tmp"), (shm_mb(spec.limits), "/dev/shm")):  # noqa: S108
        arguments += ["--perms", "1777", "--size", str(size * MIB), "--tmpfs", target]
    arguments += _bound(tuple((str(folder), seen) for folder, seen in place.counters))
    if spec.draws_pages:
        arguments += ["--ro-bind-try", FONTS, FONTS]
    if place.doors is not None:
        arguments += _bound(((str(place.doors), EGRESS_FOLDER),))
    if place.workspace is not None:
        arguments += ["--ro-bind" if spec.workspace == "ro" else "--bind", str(place.workspace), WORKSPACE]
    return arguments


def _bound(binds: tuple[tuple[str, str], ...]) -> list[str]:
    """Read-only, with their parents open to all."""
    arguments = []
    for source, target in binds:
        for parent in reversed(Path(target).parents[:-1]):
            arguments += ["--dir", str(parent)]
        arguments += ["--ro-bind", source, target]
    return arguments


def _environment(spec: SandboxSpec, place: Place) -> list[str]:
    folders = dict.fromkeys((place.interpreter.folder, "/usr/bin", "/usr/sbin", "/bin", "/sbin"))
    found = {"PATH": ":".join(folders), **_ENV, **thread_env(spec.limits), **spec.env}
    return [part for name, value in sorted(found.items()) for part in ("--setenv", name, value)]


def _drop_user(place: Place) -> list[str]:
    if place.uid is None:
        return []
    user = ["--reuid", str(place.uid), "--regid", str(place.uid), "--clear-groups"]
    return ["setpriv", *user, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--pdeathsig", "KILL"]


def _limits(spec: SandboxSpec, place: Place) -> list[str]:
    """Of each process, but `nproc`, which counts the user's. `data` is private memory, so MemoryError comes at the limit."""
    limits = spec.limits
    memory, disk = limits.memory_mb * MIB, limits.disk_mb * MIB
    nproc = limits.pids + bool(place.counters)  # what the control group refuses is counted, so it comes first
    bounds = {"core": 0, "nofile": place.open_files, "nproc": nproc, "fsize": disk}
    bounds |= {"data": memory} | ({} if spec.draws_pages else {"as": memory + MAPPED_MB * MIB})
    return ["prlimit", *(f"--{name}={math.ceil(value)}" for name, value in bounds.items()), "--"]
