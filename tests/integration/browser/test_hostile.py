"""Pages whose scripts mean harm: each call ends in bounded time with a clear answer, and the next one works."""

from __future__ import annotations

import time

import pytest

from tests.integration.browser.browser_sandbox import BrowserSandbox, Proxy
from tests.integration.browser.hostile_pages import check, open_

pytestmark = pytest.mark.docker


@pytest.mark.parametrize(
    ("path", "end", "said"),
    [
        ("/loop", "done", "ran without end and was stopped"),
        ("/alerts", "failed", "more than 20 dialogs"),
        ("/dialogs", "done", "dialog (confirm): 'sure?'. It was answered with Cancel"),
        ("/stay", "done", "sticky"),
        ("/print", "done", "printed"),
        ("/popups", "done", "more tabs than the 8"),
        ("/heap", "crashed", "The page crashed"),
        ("/buffers", "oom", "used up the memory"),
        ("/dom", "done", "longer than what is read at most"),
        ("/deep", "crashed", "The page crashed"),
        ("/sockets", "done", "sockets"),
        ("/title", "done", "title"),
    ],
)
def test_a_hostile_script_ends_with_a_clear_answer(
    browser: BrowserSandbox, pages: Proxy, path: str, end: str, said: str
) -> None:
    check(browser, path, end, said)


def test_a_click_that_never_ends_leaves_a_browser_that_works(browser: BrowserSandbox, pages: Proxy) -> None:
    open_(browser, "/click-loop")
    ending = browser.call("click", ref="e1")
    whole = " ".join([ending.message, *ending.texts])
    assert "without end" in whole or "did not answer" in whole


def test_nothing_is_permitted_that_a_page_asks_the_user_for(browser: BrowserSandbox, pages: Proxy) -> None:
    open_(browser, "/asks")
    browser.call("click", ref="e1")
    page = browser.call("wait", text="place denied").page
    assert "notes" not in page


def test_links_to_the_sandbox_itself_lead_nowhere(browser: BrowserSandbox, pages: Proxy) -> None:
    open_(browser, "/links")
    for number in range(1, 7):
        ending = browser.call("click", ref=f"e{number}")
        whole = " ".join([ending.message, *ending.texts])
        assert "root:" not in whole
        assert "Chromium" not in whole
        if ending.end != "done" or ending.structured["url"] != "http://shop.test/links":
            open_(browser, "/links")


def test_a_browser_that_is_killed_is_started_anew_and_says_so(browser: BrowserSandbox, pages: Proxy) -> None:
    open_(browser, "/ok")
    browser.run("sh", "-c", "kill -9 $(pgrep -o chromium)")
    ending = browser.call("read")
    assert ending.end in ("failed", "crashed")  # by whether its end was noticed before the call
    assert "No page is open" in ending.message or "crashed" in ending.message
    assert "started anew" in open_(browser, "/ok").notes


def test_nothing_is_left_running_or_waiting_to_be_reaped(browser: BrowserSandbox, pages: Proxy) -> None:
    browser.run("sh", "-c", "kill -9 $(pgrep -o chromium)")
    open_(browser, "/ok")
    until = time.monotonic() + 30
    while (zombies := browser.run("ps", "-eo", "stat=,comm=").count("Z")) and time.monotonic() < until:
        time.sleep(0.5)
    assert zombies == 0
    assert browser.run("ps", "-eo", "args=").count("--user-data-dir") <= 12


def test_nothing_but_the_pages_was_ever_asked_for(browser: BrowserSandbox, pages: Proxy) -> None:
    """The last of this file: all that its browsers asked for."""
    hosts = {line.split(" ")[1].split("/")[2] if "//" in line else line for line in pages.asked}
    assert hosts <= {"shop.test", "denied.test"} | {line for line in hosts if line.startswith("CONNECT shop.test:80")}
