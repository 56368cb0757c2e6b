"""What holds for every test: the machine that runs it is left as it was."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def the_machine_is_unharmed() -> Iterator[None]:
    """A sandbox with a hole, or a test without one, first shows where root can write: in /dev."""
    yield
    assert stat.S_ISCHR(os.lstat("/dev/null").st_mode), "/dev/null is no device any more"
