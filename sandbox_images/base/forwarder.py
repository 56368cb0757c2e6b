"""Makes a sandbox's door to the egress proxy, a Unix socket, an ordinary HTTP proxy at 127.0.0.1:3128 and [::1]:3128.

    python3 -I -S forwarder.py DOOR

The program says `ready` on its stdout once the door was reached through the port; else it ends with 1 and a sentence on
stderr. A worker with a `Loop` runs a Forwarder itself. The ports are taken before any code of a user runs and are never
given back, so nothing else in the sandbox can stand in for them.
"""

from __future__ import annotations

import _socket  # what `socket` wraps, at a fraction of its cost
import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))
from sandbox_images.base.event_loop import READABLE, WRITABLE, Loop, Timer

FOLDER, PORT = "/.toolcrib/egress", 3128
HOSTS = ((_socket.AF_INET, "127.0.0.1"), (_socket.AF_INET6, "::1"))
MAX_LINKS = 128  # connections at a time; more wait in the port's queue
CHUNK = 1 << 16
PROBE_S, LINGER_S, PAUSE_S = 5.0, 10.0, 0.05
BUSY_TRIES = 100  # at a door whose queue is full, PAUSE_S apart
PROBE = b"GET http://egress.toolcrib/ready HTTP/1.1\r\nHost: egress.toolcrib\r\nConnection: close\r\n\r\n"
_TAKEN = f"port {PORT} of the sandbox is taken by another program"
_CLOSED = (
    "This sandbox has no way out now: its egress is off, or the server's egress proxy is not running. Try again later."
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nX-Toolcrib-Error: no_proxy\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(_CLOSED), _CLOSED.encode())
)


class Ports:
    """The two listening sockets. Taken, they let nobody in until `Forwarder` listens.

    `again`: they may have been another process's a moment ago. Not where they wait before they listen: somebody else who says
    the same could take them as well.
    """

    def __init__(self, port: int = PORT, *, again: bool = False) -> None:
        self.port = port
        self.sockets: list[_socket.socket] = []
        self.problem: str | None = None
        for family, host in HOSTS:
            try:
                self.sockets.append(_taken(family, host, port, again=again))
            except OSError as problem:
                if problem.errno == errno.EADDRINUSE:
                    self.problem = _TAKEN
                elif family == _socket.AF_INET:  # many sandboxes have no IPv6
                    self.problem = f"there is no port for it: {problem.strerror}"

    def listen(self) -> None:
        for listener in self.sockets:
            listener.listen(MAX_LINKS)


def _taken(family: int, host: str, port: int, *, again: bool) -> _socket.socket:
    """Raises OSError."""
    taken = _socket.socket(family, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
    try:
        if family == _socket.AF_INET6:
            taken.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 1)
        if again:
            taken.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError:
        taken.close()
        raise
    return taken


class Forwarder:
    """`folder` holds the doors."""

    def __init__(self, loop: Loop, ports: Ports, folder: str = FOLDER) -> None:
        self._loop, self._ports, self._folder = loop, ports, folder
        self._links: set[_Link] = set()
        self._door: str | None = None
        self._listens, self._accepting = False, False

    def open(self, door: str, done: Callable[[str | None], None]) -> None:
        """From now on connections go to this door. `done` gets None once it answered, else why it can't be used."""
        if self._ports.problem is not None:
            done(self._ports.problem)
            return
        if self._door not in (None, door):
            self._cut()
        self._door = door
        if not self._listens:
            try:
                self._ports.listen()
            except OSError:
                done(_TAKEN)
                return
            self._listens = True
        self._accept_more()
        _Probe(self._loop, self._ports.port, done).start()

    def close(self) -> None:
        """What comes from now on is told that there is no way out."""
        self._door = None
        self._cut()

    @property
    def is_open(self) -> bool:
        return self._door is not None

    def _cut(self) -> None:
        for link in list(self._links):
            link.close()

    def _accept_more(self) -> None:
        if self._accepting or not self._listens or len(self._links) >= MAX_LINKS:
            return
        self._accepting = True
        for listener in self._ports.sockets:
            self._loop.watch(listener.fileno(), lambda _events, listener=listener: self._accept(listener))  # type: ignore[misc]

    def _accept_none(self) -> None:
        self._accepting = False
        for listener in self._ports.sockets:
            self._loop.unwatch(listener.fileno())

    def _accept(self, listener: _socket.socket) -> None:
        try:
            number, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - so it is called below `socket`
        except OSError as problem:
            if problem.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._accept_none()
                self._loop.call_later(PAUSE_S, self._accept_more)
            return
        os.set_blocking(number, False)
        os.set_inheritable(number, False)
        path = None if self._door is None else f"{self._folder}/{self._door}"
        link = _Link(self._loop, number, path, self._ended)
        self._links.add(link)
        link.connect()
        if len(self._links) >= MAX_LINKS:
            self._accept_none()

    def _ended(self, link: _Link) -> None:
        self._links.discard(link)
        self._accept_more()


class _Side:
    """One of a link's two sockets. `pending` waits to be written to it."""

    __slots__ = ("deaf", "fd", "pending", "read_all", "shut", "watched")

    def __init__(self, fd: int) -> None:
        self.fd, self.pending, self.watched = fd, b"", 0
        self.read_all = False  # nothing more comes from it
        self.shut = False  # it was told that nothing more comes from the other one
        self.deaf = False  # it takes nothing any more: what is for it is thrown away


class _Link:
    """A program's connection and its way to the door: bytes go both ways, at most CHUNK waits each way."""

    def __init__(self, loop: Loop, inner: int, path: str | None, ended: Callable[[_Link], None]) -> None:
        self._loop, self._path, self._ended = loop, path, ended
        self._inner, self._outer = _Side(inner), _Side(-1)
        self._tries = 0
        self._lingering: Timer | None = None
        self._closed = False

    def connect(self) -> None:
        if self._closed:
            return
        try:
            if self._path is None:
                raise FileNotFoundError(errno.ENOENT, "closed")
            door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
            try:
                door.connect(self._path)
            except BaseException:
                door.close()
                raise
        except BlockingIOError:  # its queue is full, and nothing tells when it is not
            self._tries += 1
            if self._tries < BUSY_TRIES:
                self._loop.call_later(PAUSE_S, self.connect)
            else:
                self._refuse()
            return
        except OSError:
            self._refuse()
            return
        self._outer.fd = door.detach()
        self._look()

    def _refuse(self) -> None:
        """There is no door: the program is told so, in place of the proxy."""
        self._inner.pending, self._outer.read_all, self._outer.deaf = REFUSAL, True, True
        self._look()

    def _look(self) -> None:
        """Watch for what can go on now; close when nothing can."""
        inner, outer = self._inner, self._outer
        for side, other in ((inner, outer), (outer, inner)):
            if other.read_all and not side.pending and not side.shut:
                side.shut = True
                if side.fd >= 0:
                    with suppress(OSError):
                        _shut(side.fd)
        if inner.read_all and outer.read_all and not inner.pending and not outer.pending:
            self.close()
            return
        if outer.read_all and inner.shut and self._lingering is None:
            self._lingering = self._loop.call_later(
                LINGER_S, self.close
            )  # what it still sends is read, so that it sees our end
        for side, other in ((inner, outer), (outer, inner)):
            reads = not side.read_all and not other.pending
            wanted = (READABLE if reads else 0) | (WRITABLE if side.pending else 0)
            if side.fd < 0 or wanted == side.watched:
                continue
            side.watched = wanted
            if wanted:
                self._watch(side, other, wanted)
            else:
                self._loop.unwatch(side.fd)

    def _watch(self, side: _Side, other: _Side, events: int) -> None:
        self._loop.watch(side.fd, lambda seen: self._go_on(side, other, seen), events)

    def _go_on(self, side: _Side, other: _Side, events: int) -> None:
        if side.pending and events & ~READABLE:
            self._write(side)
        if not side.read_all and not other.pending and events & ~WRITABLE:
            try:
                data = os.read(side.fd, CHUNK)
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            if data == b"":
                side.read_all = True
            elif data is not None:
                other.pending = data
                self._write(other)
        self._look()

    def _write(self, side: _Side) -> None:
        if not side.deaf:
            try:
                side.pending = side.pending[os.write(side.fd, side.pending) :]
                return
            except BlockingIOError:
                return
            except OSError:
                side.deaf = True  # it may still have something to say
                if side is self._inner:
                    side.read_all = self._outer.read_all = True
                    self._outer.pending = b""
        side.pending = b""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lingering is not None:
            self._lingering.cancel()
        for side in (self._inner, self._outer):
            if side.fd >= 0:
                self._loop.unwatch(side.fd)
                os.close(side.fd)
        self._ended(self)


class _Probe:
    """Asks the door through the port, as any program would."""

    def __init__(self, loop: Loop, port: int, done: Callable[[str | None], None]) -> None:
        self._loop, self._port, self._done = loop, port, done
        self._socket = _socket.socket(
            _socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        )
        self._timer = loop.call_later(PROBE_S, lambda: self._end("the egress proxy did not answer in time"))
        self._to_send, self._answer = PROBE, b""

    def start(self) -> None:
        try:
            self._socket.connect((HOSTS[0][1], self._port))
        except BlockingIOError:
            pass
        except OSError as problem:
            self._end(f"the port can't be reached: {problem.strerror}")
            return
        self._loop.watch(self._socket.fileno(), lambda _events: self._go_on(), WRITABLE)

    def _go_on(self) -> None:
        try:
            if self._to_send:
                self._to_send = self._to_send[self._socket.send(self._to_send) :]
                if not self._to_send:
                    self._loop.watch(self._socket.fileno(), lambda _events: self._go_on(), READABLE)
                return
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError as problem:
            self._end(f"the egress proxy can't be reached: {problem.strerror}")
            return
        self._answer += data
        line, end, _ = self._answer.partition(b"\r\n")
        if end or not data or len(self._answer) > 4096:
            good = end and line.split(b" ")[1:2] == [b"204"]
            self._end(None if good else "there is no egress proxy behind the sandbox's door")

    def _end(self, problem: str | None) -> None:
        self._timer.cancel()
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()
        self._done(problem)


def _shut(fd: int) -> None:
    """Tell the other end of a socket that nothing more comes. Raises OSError."""
    view = _socket.socket(fileno=os.dup(fd))
    try:
        view.shutdown(_socket.SHUT_WR)
    finally:
        view.close()


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].isalnum():
        print("forwarder: one argument is needed, the name of a door", file=sys.stderr)
        return 2
    loop, problems = Loop(), list[str]()

    def done(problem: str | None) -> None:
        if problem is None:
            print("ready", flush=True)
        else:
            problems.append(problem)
            loop.stop()

    Forwarder(loop, Ports(again=True)).open(sys.argv[1], done)
    if not problems:
        loop.run()
    print(f"forwarder: {problems[0]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
