"""Pages that mean harm, and how the browser is to answer each."""

from __future__ import annotations

import socket
import time

from tests.integration.browser.browser_sandbox import BrowserSandbox, Ending, Page, answer


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


def open_(browser: BrowserSandbox, path: str) -> Ending:
    return browser.call("open", url=f"http://shop.test{path}")


def check(browser: BrowserSandbox, path: str, end: str, said: str) -> None:
    """It ends so, in bounded time and size, and tells nothing of the sandbox's files."""
    begin = time.monotonic()
    ending = open_(browser, path)
    assert time.monotonic() - begin < 60
    whole = " ".join([ending.message, *ending.texts, ending.notes])
    assert (ending.end, said in whole) == (end, True), ending
    assert "root:" not in whole
    assert len(whole) < 200_000
