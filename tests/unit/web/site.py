"""A web server of the tests that says exactly the bytes it is told to, at the pace it is told to."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Body = bytes | Callable[[], Iterable[bytes]]


@dataclass
class Reply:
    """headers as given, and Content-Length beside them for a body of bytes unless `length` says another (None: no such header)."""

    body: Body = b""
    content_type: str | None = "text/html"
    status: str = "200 OK"
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = -1

    def pieces(self) -> Iterator[bytes]:
        lines = [f"HTTP/1.1 {self.status}"]
        lines += [f"Content-Type: {self.content_type}"] if self.content_type is not None else []
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if isinstance(self.body, bytes) and self.length == -1:
            lines.append(f"Content-Length: {len(self.body)}")
        elif self.length is not None and self.length >= 0:
            lines.append(f"Content-Length: {self.length}")
        yield ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode("latin-1")
        yield from [self.body] if isinstance(self.body, bytes) else self.body()


def redirect(location: str, status: str = "302 Found") -> Reply:
    return Reply(b"<p>moved</p>", status=status, headers={"Location": location})


def drip(first: bytes, piece: bytes, pause_s: float, count: int) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield first
        for _ in range(count):
            time.sleep(pause_s)
            yield piece

    return pieces


class Site(socketserver.ThreadingTCPServer):
    """`pages` maps a path (without its query) to its Reply, or to raw pieces. `connections` counts; `seen` has each request."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, Reply | Callable[[], Iterable[bytes]]] = {}
        self.seen: list[str] = []
        self.connections = 0

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.port}{path}"


class _Handler(socketserver.BaseRequestHandler):
    server: Site

    def handle(self) -> None:
        self.server.connections += 1
        self.request.settimeout(20)
        with suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                more = self.request.recv(65_536)
                if not more:
                    return
                data += more
            self.server.seen.append(data.decode("latin-1"))
            path = data.split(b" ")[1].decode("latin-1").partition("?")[0]
            page = self.server.pages.get(path, Reply(b"<h1>no such page</h1>", status="404 Not Found"))
            for piece in page.pieces() if isinstance(page, Reply) else page():
                self.request.sendall(piece)


@contextmanager
def running_site() -> Iterator[Site]:
    with Site() as site:
        thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield site
        finally:
            site.shutdown()
            thread.join()
