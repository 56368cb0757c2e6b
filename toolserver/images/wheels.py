"""Python packages for an image, fetched by this machine's pip, which knows its registry and certificates.

The build itself needs no network, and nothing of this machine's settings gets into the image.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from toolserver.images.definition import ImageBuildError

LIMIT_S = 900
# newest glibc first; pip takes the first tag that a wheel has
MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")


def download_wheels(requirements: Sequence[str], python: str, machine: str, into: Path) -> None:
    """Wheels of `requirements`, their dependencies and pip itself, for a Python such as "3.11" on a machine such as "x86_64".

    Raises ImageBuildError.
    """
    platforms = [f"--platform={tag}_{machine}" for tag in MANYLINUX]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms),
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
