from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WorkerProcess, sandboxed


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A plain worker, for code that harms nothing."""
    process = WorkerProcess(tmp_path)
    yield process
    assert process.close() == 0


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker as PID 1 of its own namespaces, for hostile code."""
    tmp_path.chmod(0o777)
    process = WorkerProcess(tmp_path, sandboxed(tmp_path), root="/mnt")
    process.result("toolcrib/bind", env={}, limits={"disk_mb": 64, "memory_mb": 512})
    yield process
    assert process.process.poll() is None, "the worker did not survive"
    assert process.close() == 0
