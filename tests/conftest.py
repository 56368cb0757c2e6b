"""What holds for every test: the machine that runs it is left as it was."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def the_machine_is_unharmed() -> Iterator[None]:
    """A sandbox with a hole, or a test without one, first shows where root can write: in /dev."""
    yield
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode), "/dev/null is no device any more"


@pytest.fixture(scope="session", autouse=True)
def no_disks_are_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers mounted that a test killed and never started again; a server's next start would take it away."""
    yield
    if os.geteuid() != 0:
        return
    base = str(tmp_path_factory.getbasetemp())
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounted if place.startswith(base)), reverse=True):
        subprocess.run(["umount", "-l", place], check=False, capture_output=True)
    listing = ["losetup", "-l", "-n", "-O", "NAME,BACK-FILE"]
    devices = subprocess.run(listing, check=False, capture_output=True, text=True).stdout
    for device in (line.split()[0] for line in devices.splitlines() if base in line):
        subprocess.run(["losetup", "-d", device], check=False, capture_output=True)
