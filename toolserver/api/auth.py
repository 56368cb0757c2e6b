"""Who asks: API keys as Bearer tokens, known by their digest."""

from __future__ import annotations

import time
from collections.abc import Callable

from toolserver.errors import Code, ToolServerError
from toolserver.store import keys
from toolserver.store.database import Database
from toolserver.store.keys import Key

_BELIEVED_S = 2.0  # a key revoked from the command line is refused after this time at the latest
_MAX_HEADER = 1024


class Authenticator:
    """Looks keys up by the digest of what was sent, so the time of a comparison tells nothing of a stored key."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock = database, clock
        self._known: dict[bytes, tuple[Key, float]] = {}

    def known(self, header: bytes | None) -> Key | None:
        """The key of an Authorization header that was looked up a moment ago."""
        found = self._known.get(header) if header is not None else None
        if found is None or self._clock() - found[1] >= _BELIEVED_S:
            return None
        return found[0]

    async def look_up(self, header: bytes | None) -> Key:
        """Raises unauthorized, StoreUnavailable."""
        token = _token(header)
        if token is not None and header is not None:
            wanted = keys.digest(token)
            key = await self._database.read(lambda connection: keys.find(connection, wanted))
            if key is not None:
                self._known[header] = (key, self._clock())
                return key
            self._known.pop(header, None)
        raise ToolServerError(Code.UNAUTHORIZED, "Send a valid API key as Authorization: Bearer KEY.")


def _token(header: bytes | None) -> str | None:
    if header is None or len(header) > _MAX_HEADER:
        return None
    scheme, _, token = header.decode("latin-1").partition(" ")
    return token if scheme.lower() == "bearer" and token and token.isascii() else None
