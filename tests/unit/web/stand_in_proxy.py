"""Stands in for the egress proxy: lets through to the places it was told, and refuses in the proxy's form. Counts what it let out."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

REFUSED = b"It is not allowed."


class StandInProxy(socketserver.ThreadingTCPServer):
    """`places`: (host, port) as asked for, and the port of this machine that it stands for. `down`: could not be had."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.places: dict[tuple[str, int], int] = {}
        self.down: set[str] = set()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def let(self, port: int, *hosts: str) -> None:
        for host in hosts or ("127.0.0.1",):
            self.places[host, port] = port


class _Handler(socketserver.BaseRequestHandler):
    server: StandInProxy

    def handle(self) -> None:
        self.request.settimeout(30)
        with suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                more = self.request.recv(65_536)
                if not more:
                    return
                head += more
            line, _, rest = head.partition(b"\r\n")
            method, url, _ = line.decode("latin-1").split(" ")
            self.server.asked.append(f"{method} {url}")
            parts = urlsplit(f"//{url}" if method == "CONNECT" else url)
            host, port = parts.hostname or "", parts.port or 80
            if host in self.server.down:
                self._say("502 Bad Gateway", b"The name has no address.", "X-Toolcrib-Error: no_address")
                return
            target = self.server.places.get((host, port))
            if target is None:
                self._say("403 Forbidden", REFUSED, "X-Toolcrib-Denied: nothing allows it")
                return
            with socket.create_connection(("127.0.0.1", target), 30) as onward:
                if method == "CONNECT":
                    self.request.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                else:
                    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                    onward.sendall(f"{method} {path} HTTP/1.1\r\n".encode("latin-1") + rest)
                threading.Thread(target=_copy, args=(self.request, onward), daemon=True).start()
                _copy(onward, self.request)

    def _say(self, status: str, body: bytes, header: str) -> None:
        head = f"HTTP/1.1 {status}\r\n{header}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n\r\n"
        self.request.sendall(head.encode() + body)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextmanager
def running_proxy() -> Iterator[StandInProxy]:
    with StandInProxy() as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
