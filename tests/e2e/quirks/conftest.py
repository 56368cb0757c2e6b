from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.quirks.stage import Stage
from tests.server_process import ServerProcess


@pytest.fixture
def stage(tmp_path: Path, toolserver: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, toolserver, monkeypatch)
