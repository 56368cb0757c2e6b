from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.toolserver.crib import Crib, running, settings


@pytest.fixture
async def crib(tmp_path: Path) -> AsyncIterator[Crib]:
    async with running(settings(tmp_path)) as found:
        yield found
