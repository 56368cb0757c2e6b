"""A relay on the loopback address for clients that can't send our key, which loses a connection when it is asked to."""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

CUT = b"cut-this-stream"  # a POST whose body has it loses its connection behind the first event, once each
_LENGTH = re.compile(rb"(?im)^content-length:[ \t]*(\d+)")
_LAST_EVENT = re.compile(rb"(?im)^last-event-id:")


class Loopback(socketserver.ThreadingTCPServer):
    """One request a connection. `cuts` and `resumed` count what happened."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: str, key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.place, self.key = (urlsplit(target).hostname, urlsplit(target).port), key
        self.cuts = self.resumed = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/mcp"


class _Relay(socketserver.BaseRequestHandler):
    server: Loopback

    def handle(self) -> None:
        client: socket.socket = self.request
        with contextlib.suppress(OSError):
            head, body = _read(client)
            if not head:
                return
            self.server.resumed += _LAST_EVENT.search(head) is not None
            cut = head.startswith(b"POST") and CUT in body
            first, _, rest = head.partition(b"\r\n")
            kept = re.sub(rb"(?im)^(connection|authorization):.*\r\n", b"", rest)
            added = b"Connection: close\r\nAuthorization: Bearer %b\r\n" % self.server.key.encode()
            with socket.create_connection(self.server.place) as server:
                server.sendall(first + b"\r\n" + added + kept + body)
                leaving = threading.Thread(target=_until_end, args=(client, server), daemon=True)
                leaving.start()
                self._answer(server, client, cut=cut)

    def _answer(self, server: socket.socket, client: socket.socket, *, cut: bool) -> None:
        seen = b""
        while data := server.recv(65536):
            client.sendall(data)
            seen = (seen + data)[-65536:] if cut else b""
            if cut and b"\n\n" in seen.partition(b"\r\n\r\n")[2]:
                self.server.cuts += 1
                break
        client.shutdown(socket.SHUT_RDWR)


def _read(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        more = client.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    while length is not None and len(body) < int(length[1]):
        body += client.recv(65536)
    return head + b"\r\n\r\n", body


def _until_end(client: socket.socket, server: socket.socket) -> None:
    """A client that goes takes its request along."""
    with contextlib.suppress(OSError):
        while client.recv(4096):
            pass
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def loopback(target: str, key: str) -> Iterator[Loopback]:
    with Loopback(target, key) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
