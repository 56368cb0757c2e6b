"""The same browser in a sandbox of bubblewrap, with the Chromium of this machine."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_images.browser.chromium import PROGRAM
from tests.integration.browser.browser_sandbox import BrowserSandbox, Proxy
from toolserver.runtime.base import Limits

pytestmark = [
    pytest.mark.bubblewrap,
    pytest.mark.skipif(not os.access(PROGRAM, os.X_OK), reason="needs the Debian package chromium-headless-shell"),
    pytest.mark.skipif(os.geteuid() != 0, reason="pages are served in the sandbox's network namespace"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrowserSandbox]:
    made = BrowserSandbox(tmp_path_factory.mktemp("browser"), Limits(1024, 1.0, 256, 256), "bubblewrap")
    yield made
    made.close()


@pytest.fixture(scope="module")
def proxy(browser: BrowserSandbox) -> Proxy:
    made = browser.proxy()
    made.pages = {
        "/": "<title>Here</title><h1>A page</h1><a href='/next'>on</a><p>" + "wide words " * 50,
        "/next": "<title>Next</title><p>the next one",
        "/file.txt": ("text/plain", b"contents"),
        "/buffers": "<script>const a = []; try { for (let i = 0; i < 4000; i++) a.push(new Uint8Array(1 << 20).fill(i + 1)) }"
        "catch { document.title = 'stopped' }</script>",
    }
    return made


def test_pages_are_opened_clicked_and_drawn(browser: BrowserSandbox, proxy: Proxy) -> None:
    opened = browser.call("open", url="http://shop.test/")
    assert "# A page" in opened.page, opened
    assert browser.call("click", ref="e1").structured["title"] == "Next"
    browser.call("back")
    picture = browser.call("screenshot")
    (block,) = [block for block in picture.content if block["type"] == "image"]
    assert len(base64.b64decode(block["data"])) > 5_000  # letters, not an empty page
    assert (
        proxy.asked == ["GET http://shop.test/ HTTP/1.1", "GET http://shop.test/next HTTP/1.1"] or len(proxy.asked) == 3
    )


def test_downloads_land_in_the_workspace(browser: BrowserSandbox, proxy: Proxy, tmp_path: Path) -> None:
    (artifact,) = browser.call("download", url="http://shop.test/file.txt").outcome["artifacts"]
    assert artifact == {"path": "downloads/file.txt", "bytes": 8, "media_type": "text/plain"}


def test_a_page_that_takes_all_memory_is_stopped_or_ends_alone(browser: BrowserSandbox, proxy: Proxy) -> None:
    ending = browser.call("open", url="http://shop.test/buffers")
    assert ending.end in ("oom", "crashed") or ending.structured["title"] == "stopped"  # by which bound comes first
    assert browser.call("open", url="http://shop.test/next").structured["title"] == "Next"
