"""The server name in the first TLS message of a client (RFC 8446, 4.1.2; RFC 6066, 3), and nothing else of it."""

from __future__ import annotations

MAX_BYTES = 64 * 1024
HANDSHAKE, CLIENT_HELLO, SERVER_NAME = 22, 1, 0
# fatal alerts, as a TLS client reads them: access_denied
ALERT = bytes((21, 3, 3, 0, 2, 2, 49))


class NotTlsError(Exception):
    """These bytes begin no TLS connection, or one that can't be read."""


def begins_tls(first: bytes) -> bool:
    return first[:1] == bytes((HANDSHAKE,))


def server_name(data: bytes) -> str | bool | None:
    """The name in lower case; None when the message is whole and names none; False when more bytes are needed.

    Raises NotTlsError.
    """
    message = _message(data)
    if message is None:
        if len(data) > MAX_BYTES:
            raise NotTlsError("the first TLS message is too long")
        return False
    try:
        return _name(_Bytes(message))
    except (IndexError, UnicodeDecodeError) as problem:
        raise NotTlsError("the first TLS message can't be read") from problem


def _message(data: bytes) -> bytes | None:
    """The ClientHello out of its records (it may be split over several), None when it is not whole yet."""
    message, at = b"", 0
    while len(message) < 4 or len(message) < 4 + int.from_bytes(message[1:4], "big"):
        record = data[at : at + 5]
        if (record and record[0] != HANDSHAKE) or (len(record) > 1 and record[1] != 3):
            raise NotTlsError("no TLS record")
        if len(record) < 5:
            return None
        size = int.from_bytes(record[3:5], "big")
        if not 0 < size <= 16_384:
            raise NotTlsError("no TLS record")
        if len(data) < at + 5 + size:
            return None
        message += data[at + 5 : at + 5 + size]
        if message[0] != CLIENT_HELLO:
            raise NotTlsError("no ClientHello")
        at += 5 + size
    return message[4 : 4 + int.from_bytes(message[1:4], "big")]


class _Bytes:
    """Reads fields one after the other. Raises IndexError past the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise IndexError
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    @property
    def left(self) -> bool:
        return self._at < len(self._data)


def _name(hello: _Bytes) -> str | None:
    hello.take(2 + 32)  # version, random
    hello.take(hello.number(1))  # session id
    hello.take(hello.number(2))  # cipher suites
    hello.take(hello.number(1))  # compression methods
    if not hello.left:
        return None
    extensions = _Bytes(hello.take(hello.number(2)))
    found: str | None = None
    while extensions.left:
        kind, body = extensions.number(2), extensions.take(extensions.number(2))
        if kind != SERVER_NAME:
            continue
        names = _Bytes(body)
        names = _Bytes(names.take(names.number(2)))
        if found is not None or names.number(1) != 0:
            raise IndexError  # two lists, or a name of another kind
        found = names.take(names.number(2)).decode("ascii").lower()
        if names.left:
            raise IndexError  # two names
    return found
