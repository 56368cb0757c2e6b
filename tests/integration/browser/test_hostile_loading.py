"""Servers and documents that mean harm: endless, in circles, to where nothing may be."""

from __future__ import annotations

import pytest

from tests.integration.browser.browser_sandbox import BrowserSandbox, Proxy
from tests.integration.browser.hostile_pages import check

pytestmark = pytest.mark.docker


@pytest.mark.parametrize(
    ("path", "end", "said"),
    [
        ("/endless", "done", "still loading"),
        ("/head", "failed", "did not answer within"),
        ("/file", "done", "larger than"),
        ("/circle", "failed", "ERR_TOO_MANY_REDIRECTS"),
        ("/to-file", "failed", "ERR_UNSAFE_REDIRECT"),
        ("/to-denied", "denied", "denied.test:80 is refused"),
        ("/auth", "done", "401"),
        ("/meta", "done", "and was stopped"),
        ("/script-moves", "done", "and was stopped"),
        ("/downloads", "done", "Downloaded f0.txt"),
        ("/iframe-file", "done", "frames"),
    ],
)
def test_a_hostile_answer_ends_with_a_clear_answer(
    browser: BrowserSandbox, pages: Proxy, path: str, end: str, said: str
) -> None:
    check(browser, path, end, said)


def test_nothing_but_the_pages_was_ever_asked_for(browser: BrowserSandbox, pages: Proxy) -> None:
    """The last of this file: all that its browsers asked for."""
    hosts = {line.split(" ")[1].split("/")[2] if "//" in line else line for line in pages.asked}
    assert hosts <= {"shop.test", "denied.test"} | {line for line in hosts if line.startswith("CONNECT shop.test:80")}
