from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.browser.browser_sandbox import BrowserSandbox, Proxy
from tests.integration.browser.hostile_pages import PAGES, open_
from toolserver.images.build import build_images
from toolserver.runtime.base import Limits

LIMITS = Limits(memory_mb=1024, cpus=1.0, pids=256, disk_mb=512)  # what a session has by default, but for the disk


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserSandbox]:
    if os.geteuid() != 0:
        pytest.skip("pages are served in the sandbox's network namespace, which only root can enter")
    build_images(["browser"])
    made = BrowserSandbox(tmp_path_factory.mktemp("browser"), LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def proxy(browser: BrowserSandbox) -> Proxy:
    return browser.proxy()


@pytest.fixture
def pages(browser: BrowserSandbox, proxy: Proxy) -> Iterator[Proxy]:
    proxy.pages = dict(PAGES)
    yield proxy
    ending = open_(browser, "/ok")
    assert ending.end == "done", ending
    assert "all is well" in ending.page
