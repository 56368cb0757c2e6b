"""What the machine that runs the server has: kernel, namespaces, files, room, clock. `root` is that of its files."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from pathlib import Path

from toolserver.doctor.check import Check, check
from toolserver.runtime.hardening import OPEN_FILES
from toolserver.settings import Settings

OPENAT2_KERNEL = (5, 6)
ROOM_MB = 2048
EARLIEST = 1_735_689_600  # 2025: no machine that runs this version has an earlier date
FILES_A_CONNECTION = 2


def host_checks(settings: Settings, root: Path = Path("/")) -> list[Check]:
    return [
        _kernel(),
        _control_groups(root),
        _seccomp(root),
        _user_namespaces(root),
        _open_files(settings.http.max_connections),
        *_state_folder(settings.state_dir),
        _clock(),
    ]


def _kernel() -> Check:
    release = platform.release()
    version = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    old = (
        "Take Linux 5.6 or newer: before it, files are opened step by step instead of in one."
        if version < OPENAT2_KERNEL
        else ""
    )
    return check("kernel", f"{platform.system()} {release}, {platform.machine()}", old)


def _control_groups(root: Path) -> Check:
    folder = root / "sys/fs/cgroup"
    if (folder / "cgroup.controllers").exists():
        return check("control groups", "version 2")
    if (folder / "memory").is_dir():
        unified = (folder / "unified").is_dir()
        return check("control groups", "version 1" + (" with an empty version 2 beside it" if unified else ""))
    return check("control groups", "none are mounted", "Mount them (most systems do): without, no limit holds.")


def _seccomp(root: Path) -> Check:
    actions = _read(root / "proc/sys/kernel/seccomp/actions_avail")
    missing = (
        ""
        if "errno" in actions.split()
        else "Take a kernel with CONFIG_SECCOMP_FILTER: system calls can't be filtered."
    )
    return check("seccomp", actions or "not in this kernel", missing)


def _user_namespaces(root: Path) -> Check:
    """Only bubblewrap without root needs them."""
    most = _read(root / "proc/sys/user/max_user_namespaces")
    closed = [
        name
        for name, shut in (
            ("kernel.unprivileged_userns_clone", "0"),
            ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        )
        if _read(root / "proc/sys" / name.replace(".", "/")) == shut
    ]
    if most in ("", "0"):
        return check("user namespaces", "none may be made")
    return check("user namespaces", f"at most {most}" + "".join(f", not without root: {name}" for name in closed))


def _open_files(connections: int) -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    told = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    least = max(OPEN_FILES, connections * FILES_A_CONNECTION)
    low = ""
    if hard != resource.RLIM_INFINITY and hard < least:
        low = f"Raise it to {least} (ulimit -Hn, LimitNOFILE=): connections are refused sooner, and processes of bubblewrap's sandboxes get {min(hard, OPEN_FILES)}."
    return check("open files", f"at most {told}", low)


def _state_folder(folder: Path) -> list[Check]:
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return [
            check(
                "state folder",
                f"{folder} can't be written",
                "Give it to the server's user, or name another with --state-dir.",
                problem=True,
            )
        ]
    free_mb = shutil.disk_usage(place).free >> 20
    low = f"Make room: {ROOM_MB} MiB or more; a full disk stops calls." if free_mb < ROOM_MB else ""
    checks = [check("room", f"{free_mb} MiB free", low)]
    mode = folder.stat().st_mode & 0o077 if folder.exists() else 0
    shut = f"chmod 700 {folder}: it holds the database." if mode else ""
    return [
        check(
            "state folder",
            f"{folder}" + (", open to others" if mode else "") + ("" if folder.exists() else ", not made yet"),
            shut,
        ),
        *checks,
    ]


def _clock() -> Check:
    now = time.time()
    wrong = "Set the clock: expiry and tombstones go by it." if now < EARLIEST else ""
    return check("clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)), wrong)


def _read(place: Path) -> str:
    try:
        return place.read_text().strip()
    except OSError:
        return ""
