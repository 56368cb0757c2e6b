from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.web.site import Site, running_site
from tests.unit.web.worker_process import Worker, running_worker


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """May be fetched: the worker's operator allows it."""
    with running_site() as made:
        yield made


@pytest.fixture(scope="module")
def canary() -> Iterator[Site]:
    """May not be fetched, and must never see a connection."""
    with running_site() as made:
        yield made
        assert made.connections == 0


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    with running_worker(allow_private=f"127.0.0.1:{site.port}") as made:
        yield made
