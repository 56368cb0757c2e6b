"""Undoes Content-Encoding in bounded pieces: a bomb is noticed by its ratio, and never unpacked whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

PIECE_BYTES = 64 << 10
MAX_RATIO = 150  # honest text stays below 30; zlib can reach 1,032
RATIO_FROM_BYTES = 1 << 20  # small bodies of one repeated letter are harmless


class CannotInflate(Exception):  # noqa: N818 - reads as what it names
    """The body can't be unpacked; the message says why."""


class Inflater:
    """Feed it what arrives, in order; it gives pieces of at most PIECE_BYTES. `encoding` is the header's value."""

    def __init__(self, encoding: str) -> None:
        names = [name.strip().lower() for name in encoding.split(",") if name.strip()]
        names = [name for name in names if name != "identity"]
        if len(names) > 1 or (names and names[0] not in ("gzip", "x-gzip", "deflate")):
            raise CannotInflate(
                f"the server sent Content-Encoding {encoding[:60]!r}, which was not asked for and is not known"
            )
        self._kind = names[0] if names else ""
        self._engine = zlib.decompressobj(wbits=47) if self._kind else None  # 47: gzip or zlib, by the header
        self._taken = self._given = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises CannotInflate."""
        if self._engine is None:
            yield data
            return
        self._taken += len(data)
        more = True
        while more:
            piece = self._unpack(data)
            self._given += len(piece)
            if self._given > RATIO_FROM_BYTES and self._given > MAX_RATIO * self._taken:
                raise CannotInflate(f"it unpacks to more than {MAX_RATIO} times its size, as a decompression bomb does")
            if piece:
                yield piece
            data = self._rest()
            more = bool(data) or len(piece) == PIECE_BYTES  # a full piece: the engine may hold more back

    def _unpack(self, data: bytes) -> bytes:
        assert self._engine is not None
        try:
            return self._engine.decompress(data, PIECE_BYTES)
        except zlib.error as problem:
            if self._kind == "deflate" and self._given == 0:  # some servers send it without the zlib header
                self._engine, self._kind = zlib.decompressobj(wbits=-15), "raw"
                return self._unpack(data)
            raise CannotInflate(f"its compressed body is broken ({problem})") from problem

    def _rest(self) -> bytes:
        """What is still to be unpacked of the bytes fed: what follows the compressed data is dropped, but for another member."""
        assert self._engine is not None
        if not self._engine.eof:
            return self._engine.unconsumed_tail
        rest = self._engine.unused_data
        if rest[:2] != b"\x1f\x8b":
            return b""
        self._engine = zlib.decompressobj(wbits=47)
        return rest

    @property
    def complete(self) -> bool:
        """Whether the compressed data came to its end. A body without encoding is always complete."""
        return self._engine is None or self._engine.eof or self._taken == 0
