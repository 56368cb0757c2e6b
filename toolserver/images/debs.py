"""Debian packages for an image, fetched by this machine's apt, where containers of the engine reach no package registry.

apt is told what the base image holds already, and keeps its lists and packages in a folder of ours: no root is needed,
and nothing of this machine changes.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from toolserver.images.debian_base import SUITE
from toolserver.images.definition import ImageBuildError
from toolserver.images.engine import Progress

LIMIT_S = 1200
KEEP_DAYS = 30  # then newer versions are looked for
ASK_STATUS = "print(open('/var/lib/dpkg/status', encoding='utf-8').read())"


def cached_debs(packages: Sequence[str], status: str, cache: Path, progress: Progress) -> Path:
    """A folder with `packages` and what they need beyond `status`, the base image's own list. Raises ImageBuildError."""
    key = hashlib.sha256(repr((sorted(packages), SUITE, platform.machine(), status)).encode()).hexdigest()[:16]
    folder = cache / key
    if folder.is_dir() and time.time() - folder.stat().st_mtime < KEEP_DAYS * 86_400:
        return folder
    _check_host(packages)
    progress(f"fetching Debian packages: {', '.join(packages)} and what they need")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as made:
        fresh = Path(made) / "debs"
        _download(packages, status, Path(made), fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
    return folder


def _check_host(packages: Sequence[str]) -> None:
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME") if Path("/etc/os-release").is_file() else None
    if codename != SUITE or shutil.which("apt-get") is None:
        raise ImageBuildError(
            f"The engine's containers reach no package registry, and {', '.join(packages)} can be fetched only on Debian "
            f"{SUITE}. Let the engine reach a registry (the base is then {SUITE}'s or newer, from there), or build on such a machine."
        )


def _download(packages: Sequence[str], status: str, work: Path, into: Path) -> None:
    for name in ("lists/partial", "archives/partial"):
        (work / name).mkdir(parents=True)
    (work / "status").write_text(status, "utf-8")
    options = {
        "Dir::State::lists": work / "lists",
        "Dir::State::status": work / "status",
        "Dir::Cache::archives": work / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-qq", "-y", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    _run([*apt, "update"])
    _run([*apt, "install", "--no-install-recommends", "--download-only", *packages])
    into.mkdir()
    for package in (work / "archives").glob("*.deb"):
        package.replace(into / package.name)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise ImageBuildError(f"apt-get took more than {LIMIT_S} s.") from late
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-6:])
        raise ImageBuildError(f"apt-get could not fetch the image's packages:\n{tail}")
