"""What can't be installed: a registry that is away is told from one that has no such package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.mcp_clients.installs import RegistryAway, run

PIP = (
    sys.executable,
    "-m",
    "pip",
    "--isolated",
    "--retries",
    "1",
    "--disable-pip-version-check",
    "download",
    "--no-deps",
)
NOBODY = "http://127.0.0.1:9/"


def test_a_registry_that_cant_be_reached_is_away(tmp_path: Path) -> None:
    with pytest.raises(RegistryAway, match="Connection"):
        run(*PIP, "--index-url", NOBODY, "toolcrib-no-such-package", cwd=tmp_path)


def test_a_package_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="toolcrib-no-such-package"):
        run(*PIP, "--no-index", "toolcrib-no-such-package", cwd=tmp_path)
