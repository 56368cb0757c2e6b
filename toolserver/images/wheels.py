"""Python packages for an image, fetched by this machine's pip, which knows its registry and certificates.

The build itself needs no network, and nothing of this machine's settings gets into the image.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from toolserver.images.definition import ImageBuildError
from toolserver.images.engine import Progress

LIMIT_S = 900
KEEP_DAYS = 30  # then newer versions are looked for
# newest glibc first; pip takes the first tag that a wheel has
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def cached_wheels(requirements: Sequence[str], python: str, machine: str, cache: Path, progress: Progress) -> Path:
    """A folder with the wheels, fetched when there is none or it is old: a change of our own code needs no network.

    Raises ImageBuildError.
    """
    key = hashlib.sha256(repr((sorted(requirements), python, machine)).encode()).hexdigest()[:16]
    folder = cache / key
    if folder.is_dir() and time.time() - folder.stat().st_mtime < KEEP_DAYS * 86_400:
        return folder
    progress(f"fetching packages for Python {python} on {machine}: {', '.join(requirements)}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="new-") as made:
        fresh = Path(made) / "wheels"
        fresh.mkdir()
        download_wheels(requirements, python, machine, fresh)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
    return folder


def download_wheels(
    requirements: Sequence[str], python: str, machine: str, into: Path, constraints: Path | None = None
) -> None:
    """Wheels of `requirements`, their dependencies and pip itself, for a Python such as "3.11" on a machine such as "x86_64".

    `constraints`: a file of versions to hold to. Raises ImageBuildError.
    """
    platforms = [f"--platform={tag}_{machine}" for tag in MANYLINUX]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms),
        *(["--constraint", str(constraints)] if constraints else []),
        *("--dest", str(into), "pip", *requirements),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        raise ImageBuildError(f"pip did not fetch the image's packages within {LIMIT_S} s.") from late
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-6:])
        hint = "Install pip first: python -m ensurepip\n" if "No module named pip" in done.stderr else ""
        raise ImageBuildError(f"pip could not fetch {', '.join(requirements)}. {hint}{tail}")
