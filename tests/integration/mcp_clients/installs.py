"""MCP clients of others, each in a folder of its own under the user's cache, with the versions that stand in the files beside this one.

    python -m tests.integration.mcp_clients.installs     makes them all

`make test` does so before its tests; a test that runs alone makes what it needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
KINDS = ("python-1", "python-2", "node")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolcrib" / "mcp-clients"
_LIMIT_S = 900
# what pip and npm say of a registry that can't be reached, as opposed to one that has no such package
_AWAY = re.compile(
    r"Temporary failure in name resolution|Name or service not known|Network is unreachable|NewConnectionError|ConnectTimeout"
    r"|NameResolutionError|Could not fetch URL|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ETIMEDOUT|ENETUNREACH"
)


class RegistryAway(Exception):  # noqa: N818 - reads as what it names
    """Nothing can be installed here now. The message is the installer's last words."""


def installed(kind: str) -> Path:
    """The folder that has it: `bin/python` of `python-…`; `bin/node` and `node_modules` of `node`.

    Raises RegistryAway, RuntimeError: it could not be installed for another reason.
    """
    files = [HERE / f"requirements-{kind}.txt", *([HERE / "package.json"] if kind == "node" else [])]
    wanted = hashlib.sha256(b"".join([sys.version.encode(), *(file.read_bytes() for file in files)])).hexdigest()[:16]
    folder = _CACHE / f"{kind}-{wanted}"
    with _alone(kind):
        if (folder / "whole").exists():
            return folder
        for old in _CACHE.glob(f"{kind}-*/"):
            shutil.rmtree(old)
        print(f"mcp clients: installing {kind} into {folder}", file=sys.stderr, flush=True)
        run(sys.executable, "-m", "venv", str(folder))
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "-r", str(files[0]))
        if kind == "node":
            shutil.copy(files[1], folder)
            run(str(folder / "bin/npm"), "install", "--no-package-lock", "--no-audit", "--no-fund", cwd=folder)
        (folder / "whole").touch()
    return folder


@contextmanager
def _alone(kind: str) -> Iterator[None]:
    """Among the processes of this user."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str, cwd: Path | None = None) -> None:
    search = f"{Path(command[0]).parent}:{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PATH": search}, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )  # fmt: skip
    if done.returncode != 0:
        told = f"{' '.join(command[:4])} …: {(done.stdout + done.stderr)[-2000:]}"
        raise RegistryAway(told) if _AWAY.search(told) else RuntimeError(told)


def main() -> None:
    with ThreadPoolExecutor(len(KINDS)) as threads:
        for kind, made in [(kind, threads.submit(installed, kind)) for kind in KINDS]:
            try:
                made.result()
            except RegistryAway as problem:
                print(f"mcp clients: {kind} can't be installed here, its tests are skipped: {problem}", file=sys.stderr)


if __name__ == "__main__":
    main()
