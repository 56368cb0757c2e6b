from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.web.site import Site, running_site
from tests.unit.web.stand_in_proxy import StandInProxy, running_proxy
from tests.unit.web.worker_process import Worker, running_worker


@pytest.fixture(scope="module")
def proxy() -> Iterator[StandInProxy]:
    with running_proxy() as made:
        yield made


@pytest.fixture(scope="module")
def site(proxy: StandInProxy) -> Iterator[Site]:
    """May be fetched."""
    with running_site() as made:
        proxy.let(made.port)
        yield made


@pytest.fixture(scope="module")
def canary() -> Iterator[Site]:
    """May not be fetched, and must never see a connection."""
    with running_site() as made:
        yield made
        assert made.connections == 0


@pytest.fixture(scope="module")
def worker(proxy: StandInProxy) -> Iterator[Worker]:
    with running_worker(proxy) as made:
        yield made
