"""The Python of bubblewrap sandboxes: the server's own (or the one the settings name), at neutral places inside.

Wherever it is installed (a system Python, pyenv, uv, a virtual environment of any of these), `python3` in the sandbox
finds its standard library and the environment's packages, with `-I` too, and no path of the host is seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolserver.errors import RuntimeUnavailable

IN_SANDBOX = "/opt/python"
_ASK = """
import json, os, site, sys, sysconfig
print(json.dumps({
    "base": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "prefix": os.path.realpath(sys.base_prefix), "packages": sysconfig.get_path("purelib"),
    "site": (site.getsitepackages() or [None])[0], "shared": bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """`binds`: (path of the host, path in the sandbox), in the order to mount them. `library`: a folder, in the sandbox,
    that the dynamic loader must know.
    """

    binds: tuple[tuple[str, str], ...]
    folder: str
    library: str | None


def find_interpreter(python: str | None) -> Interpreter:
    """Ask an interpreter (None: this one) where it lives. Blocking, about 50 ms. Raises RuntimeUnavailable."""
    environment = _ask(python or sys.executable)
    base = _ask(environment["base"])
    prefix = base["prefix"]
    # a system Python comes with /usr
    system = prefix in ("/", "/usr")
    place = base["site"] if system else base["site"].replace(prefix, IN_SANDBOX, 1)
    binds = [] if system else [(prefix, IN_SANDBOX)]
    if Path(environment["packages"]) != Path(base["site"]):
        binds.append((environment["packages"], place))
    elif system and not place.startswith("/usr/lib"):
        binds.append((base["site"], place))
    folder = "/usr/bin" if system else f"{IN_SANDBOX}/bin"
    return Interpreter(tuple(binds), folder, f"{IN_SANDBOX}/lib" if base["shared"] and not system else None)


def _ask(python: str) -> dict[str, str]:
    try:
        done = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=20, check=True)
        answer: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        raise RuntimeUnavailable(
            "The Python for the sandboxes does not run. Set TOOLSERVER_RUNTIME__PYTHON."
        ) from problem
    return answer
