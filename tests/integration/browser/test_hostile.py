"""Pages that mean harm: each call ends in bounded time with a clear answer, and the next one works."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from tests.integration.browser.browser_sandbox import BrowserSandbox, Ending, Page, Proxy, answer

pytestmark = pytest.mark.docker


def endless_page(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<title>Endless</title>")
    while True:
        sock.sendall(b"<p>one more row" * 100)
        time.sleep(0.05)


def endless_head(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        sock.sendall(b"X-More: 1\r\n")
        time.sleep(0.3)


def endless_file(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n\r\n")
    while True:
        sock.sendall(bytes(1 << 20))


def moved(target: str) -> Page:
    return lambda sock: sock.sendall(answer("302 Found", b"", "text/html", f"Location: {target}"))


def asks_for_a_password(sock: socket.socket) -> None:
    sock.sendall(answer("401 Unauthorized", b"log in", "text/html", 'WWW-Authenticate: Basic realm="x"'))


BUTTON = '<button onclick="{}">Go</button><p>still here'
PAGES: dict[str, Page] = {
    "/ok": "<title>Fine</title><p>all is well",
    "/endless": endless_page,
    "/head": endless_head,
    "/file": endless_file,
    "/circle": moved("/circle"),
    "/to-file": moved("file:///etc/passwd"),
    "/to-denied": moved("http://denied.test/secret"),
    "/auth": asks_for_a_password,
    "/loop": "<p>before<script>while (true) {}</script>",
    "/click-loop": BUTTON.format("while (true) {}"),
    "/alerts": "<script>for (;;) alert('again')</script>",
    "/dialogs": "<p>after<script>alert('a'); document.title = confirm('sure?') + ' ' + prompt('name?', 'x')</script>",
    "/stay": "<p>sticky<script>onbeforeunload = (event) => { event.preventDefault(); return 'stay' }</script>",
    "/print": "<p>printed<script>print()</script>",
    "/popups": "<p>popper<script>for (let i = 0; i < 60; i++) open('/ok?' + i)</script>",
    "/heap": "<script>const a = []; for (;;) a.push(new Array(1e6).fill(Math.random()))</script>",
    "/buffers": "<script>const a = []; for (let i = 0; i < 4000; i++) a.push(new Uint8Array(1 << 20).fill(i + 1))</script>",
    "/dom": "<p>first<script>for (let i = 0; i < 120000; i++) document.body.append(Object.assign(document.createElement('p'), {textContent: 'row ' + i}))</script>",
    "/deep": "<script>let d = document.documentElement; for (let i = 0; i < 20000; i++) { const e = document.createElement('div'); d.append(e); d = e }</script>",
    "/meta": "<meta http-equiv=refresh content='0;url=/meta'><p>again",
    "/script-moves": "<p>again<script>location = '/script-moves?' + Math.random()</script>",
    "/sockets": "<p>sockets<script>for (let i = 0; i < 500; i++) try { new WebSocket('ws://shop.test/' + i) } catch {}</script>",
    "/downloads": "<p>many<script>for (let i = 0; i < 100; i++) { const a = document.createElement('a'); a.href = 'data:text/plain,' + i; a.download = 'f' + i; a.click() }</script>",
    "/title": "<p>title<script>document.title = 'x'.repeat(20e6)</script>",
    "/asks": BUTTON.format(
        "navigator.geolocation.getCurrentPosition(() => place.textContent = 'place given', () => place.textContent = 'place denied');"
        "globalThis.Notification?.requestPermission().then((said) => notes.textContent = 'notes ' + said);"
        "document.documentElement.requestFullscreen?.()"
    ) + "<p id=place><p id=notes>",
    "/links": "<a href='file:///etc/passwd'>one</a><a href='chrome://version'>two</a><a href='view-source:http://shop.test/ok'>three</a>"
    "<a href='data:text/html,harm'>four</a><input type=file><button onclick=\"open('file:///etc/passwd')\">six</button>",
    "/iframe-file": "<p>frames<iframe src='file:///etc/passwd'></iframe>",
}  # fmt: skip


@pytest.fixture
def pages(browser: BrowserSandbox, proxy: Proxy) -> Iterator[Proxy]:
    proxy.pages = dict(PAGES)
    yield proxy
    ending = browser.call("open", url="http://shop.test/ok")
    assert ending.end == "done", ending
    assert "all is well" in ending.page


def open_(browser: BrowserSandbox, path: str) -> Ending:
    return browser.call("open", url=f"http://shop.test{path}")


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
        ("/meta", "done", "and was stopped"),
        ("/script-moves", "done", "and was stopped"),
        ("/sockets", "done", "sockets"),
        ("/downloads", "done", "Downloaded f0.txt"),
        ("/title", "done", "title"),
        ("/iframe-file", "done", "frames"),
    ],
)
def test_a_hostile_page_ends_with_a_clear_answer(
    browser: BrowserSandbox, pages: Proxy, path: str, end: str, said: str
) -> None:
    begin = time.monotonic()
    ending = browser.call("open", url=f"http://shop.test{path}")
    assert time.monotonic() - begin < 60
    whole = " ".join([ending.message, *ending.texts, ending.notes])
    assert (ending.end, said in whole) == (end, True), ending
    assert "root:" not in whole
    assert len(whole) < 200_000


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
