"""A base image out of Debian's packages, for machines whose engine can reach no image registry."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from toolserver.images.definition import ImageBuildError
from toolserver.images.engine import Progress

SUITE = "bookworm"
REFERENCE = f"toolcrib/debian:{SUITE}"
PACKAGES = (
    *("python3", "ca-certificates", "file", "gawk", "git", "less", "procps", "tzdata"),
    *("busybox-static", "tini"),  # what starts added images
)
KEEP_DAYS = 30  # then it is made anew, for Debian's security updates
LEFT_OUT = (
    "var/cache/apt/*",
    "var/lib/apt/lists/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "var/log/*",
)
LIMIT_S = 1200


def cache_dir() -> Path:
    """Toolcrib's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolcrib"


def debian_tarball(progress: Progress) -> Path:
    """The root file system as a tar.gz, from the cache or made now (under a minute, root only). Raises ImageBuildError."""
    key = hashlib.sha256(repr((SUITE, PACKAGES, LEFT_OUT)).encode()).hexdigest()[:12]
    tarball = cache_dir() / f"debian-{SUITE}-{platform.machine()}-{key}.tar.gz"
    if tarball.is_file() and time.time() - tarball.stat().st_mtime < KEEP_DAYS * 86_400:
        progress(f"base: from {tarball}")
        return tarball
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None or os.geteuid() != 0:
        if tarball.is_file():
            return tarball
        raise ImageBuildError(
            "The engine can't pull a base image, and one can be made here only by root with debootstrap. Either let the "
            "engine reach a registry, or name an image that it has: toolserver images build --base REF, or as root: "
            "apt-get install debootstrap"
        )
    progress(f"base: making it from Debian packages with debootstrap ({SUITE}); this takes about a minute")
    tarball.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tarball.parent, prefix="debian-") as folder:
        root, packed = Path(folder) / "root", Path(folder) / "root.tar.gz"
        made = [program, "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root), *_mirror()]
        _run(made, "debootstrap")
        left_out = [f"--exclude=./{pattern}" for pattern in LEFT_OUT]
        _run(
            ["tar", "-C", str(root), "--numeric-owner", "--one-file-system", *left_out, "-czf", str(packed), "."], "tar"
        )
        packed.replace(tarball)
    return tarball


def _mirror() -> list[str]:
    """The mirror this machine's apt uses for the suite; none named: debootstrap's own choice."""
    try:
        asked = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(RELEASE) $(SITE)", "Created-By: Packages"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    sites = [line.split()[1] for line in asked.stdout.splitlines() if line.split()[:1] == [SUITE]]
    return sites[:1]


def _run(command: list[str], what: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise ImageBuildError(f"{what} took more than {LIMIT_S} s.") from late
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise ImageBuildError(f"{what} failed with exit code {done.returncode}:\n{tail}")
