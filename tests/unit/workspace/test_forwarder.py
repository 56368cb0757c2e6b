"""The loopback forwarder, between plain sockets and a stand-in for the egress proxy."""

from __future__ import annotations

import http.client
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox_images.base import forwarder
from sandbox_images.base.event_loop import Loop
from sandbox_images.base.forwarder import MAX_LINKS, Forwarder, Ports

DOOR = "0123456789abcdef0123456789abcdef"
BULK = 8 << 20


class _Proxy(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        line = self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        match line.split()[1]:
            case b"http://egress.toolcrib/ready":
                self.wfile.write(b"HTTP/1.1 204 No Content\r\n\r\n")
            case b"http://a/echo":
                while data := self.rfile.read1(1 << 16):
                    self.wfile.write(data)
            case b"http://a/bulk":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BULK)
                self.wfile.write(b"x" * BULK)
            case b"http://a/no":
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
            case b"http://a/wait":
                time.sleep(30)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64


@dataclass
class Place:
    port: int
    folder: Path
    forwarder: Forwarder
    loop: Loop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def get(self, path: str) -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            client.request("GET", f"http://a/{path}")
            answer = client.getresponse()
            return answer.status, answer.read()
        finally:
            client.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    server = _Server(str(tmp_path / DOOR), _Proxy)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    loop, ports = Loop(), Ports(_free_port())
    shown = Place(ports.port, tmp_path, Forwarder(loop, ports, str(tmp_path)), loop)
    told: list[str | None] = []
    shown.forwarder.open(DOOR, told.append)
    _keep_turning(loop)
    thread = threading.Thread(target=loop.run)
    thread.start()
    _until(lambda: told == [None])
    yield shown
    loop.stop()
    thread.join()
    shown.forwarder.close()
    for one in ports.sockets:
        one.close()
    server.shutdown()
    server.server_close()


def _keep_turning(loop: Loop) -> None:
    loop.call_later(0.05, lambda: _keep_turning(loop))


def _until(true: object) -> None:
    until = time.monotonic() + 20
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


def _send_all(client: socket.socket) -> None:
    client.sendall(b"y" * BULK)
    client.shutdown(socket.SHUT_WR)


def test_much_goes_through_whole_both_ways(place: Place) -> None:
    assert place.get("bulk") == (200, b"x" * BULK)
    with place.connect() as client:
        client.sendall(b"POST http://a/echo HTTP/1.1\r\n\r\n")
        sender = threading.Thread(target=_send_all, args=(client,))
        sender.start()
        got = 0
        while data := client.recv(1 << 16):
            got += len(data)
        sender.join()
    assert got == BULK


def test_an_answer_comes_to_a_client_that_is_still_sending(place: Place) -> None:
    with place.connect() as client:
        client.sendall(b"POST http://a/no HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n")
        with pytest.raises(OSError):  # noqa: PT012 - which of them fails depends on the time
            for _ in range(50):
                client.sendall(b"z" * (1 << 20))
            client.settimeout(1)
            client.recv(1)
            client.settimeout(0)
            while client.recv(1 << 16):
                pass
            raise ConnectionResetError
    assert place.get("no") == (403, b"no")


def test_beyond_the_most_connections_wait_their_turn(place: Place) -> None:
    held = [place.connect() for _ in range(MAX_LINKS)]
    for one in held:
        one.sendall(b"GET http://a/wait HTTP/1.1\r\n\r\n")
    _until(lambda: len(place.forwarder._links) == MAX_LINKS)
    with place.connect() as late:
        late.sendall(b"GET http://a/no HTTP/1.1\r\n\r\n")
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.recv(1)
        for one in held:
            one.close()
        _until(lambda: len(place.forwarder._links) <= MAX_LINKS)
        late.settimeout(60)
        # the stand-in sleeps on: a held connection is let go when both of its ends are seen
        place.forwarder._cut()
        assert late.recv(12) in (b"HTTP/1.1 403", b"")


def test_without_a_door_the_answer_says_so(place: Place) -> None:
    (place.folder / DOOR).unlink()
    status, said = place.get("no")
    assert (status, b"no way out" in said) == (503, True)


def test_a_door_that_was_closed_lets_nothing_through(place: Place) -> None:
    place.forwarder.close()
    assert place.get("no")[0] == 503


@pytest.mark.parametrize("way", ["taken", "silent", "no_proxy"])
def test_what_can_not_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(forwarder, "PROBE_S", 0.3)
    port, told = _free_port(), list[str | None]()
    with socket.socket() as other, socket.socket(socket.AF_UNIX) as door:
        if way == "taken":
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
        if way == "silent":
            door.bind(str(tmp_path / DOOR))
            door.listen()
        loop, ports = Loop(), Ports(port)

        def done(problem: str | None) -> None:
            told.append(problem)
            loop.stop()

        Forwarder(loop, ports, str(tmp_path)).open(DOOR, done)
        if not told:
            loop.run()
        for one in ports.sockets:
            one.close()
    expected = {"taken": "taken by another", "silent": "in time", "no_proxy": "no egress proxy"}
    assert told[0] is not None
    assert expected[way] in told[0]


def test_nobody_else_takes_a_port_that_waits(tmp_path: Path) -> None:
    ports = Ports(_free_port())
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports.port))
    for one in ports.sockets:
        one.close()
