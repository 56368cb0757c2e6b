"""What the operator decided, read once from the environment that the worker was started with.

A session can bind environment variables of its own later. From those only the key of a search provider is taken: nobody
but the operator widens what may be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PREFIX = "TOOLCRIB_WEB_"
BRAVE_KEY = PREFIX + "BRAVE_API_KEY"
BRAVE_URL = "https://api.search.brave.com/res/v1/web/search"


@dataclass(frozen=True)
class Settings:
    """allow_private: (host, port) pairs that may be reached although they are not public; hosts in lower case."""

    allow_private: frozenset[tuple[str, int]] = frozenset()
    search_provider: str = "none"
    searxng_url: str = ""
    brave_url: str = BRAVE_URL
    brave_api_key: str = field(default="", repr=False)

    def bound(self, env: Mapping[str, str]) -> Settings:
        """With what `toolcrib/bind` brought."""
        key = env.get(BRAVE_KEY)
        return replace(self, brave_api_key=key) if key else self


def read(env: Mapping[str, str]) -> Settings:
    """Raises ValueError when a pair of TOOLCRIB_WEB_ALLOW_PRIVATE is not host:port."""
    pairs = (part.strip() for part in env.get(PREFIX + "ALLOW_PRIVATE", "").split(","))
    return Settings(
        allow_private=frozenset(_pair(part) for part in pairs if part),
        search_provider=env.get(PREFIX + "SEARCH_PROVIDER", "none").strip().lower() or "none",
        searxng_url=env.get(PREFIX + "SEARXNG_URL", "").strip(),
        brave_url=env.get(PREFIX + "BRAVE_URL", "").strip() or BRAVE_URL,
        brave_api_key=env.get(BRAVE_KEY, ""),
    )


def _pair(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.strip("[]").rstrip(".").lower()
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"{PREFIX}ALLOW_PRIVATE: {text!r} is not host:port")
    return host, int(port)
