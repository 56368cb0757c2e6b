"""What the operator decided, read once from the environment that the worker was started with.

A session can bind environment variables of its own later. From those only the key of a search provider is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PREFIX = "TOOLCRIB_WEB_"
BRAVE_KEY = PREFIX + "BRAVE_API_KEY"
BRAVE_URL = "https://api.search.brave.com/res/v1/web/search"


@dataclass(frozen=True)
class Settings:
    search_provider: str = "none"
    searxng_url: str = ""
    brave_url: str = BRAVE_URL
    brave_api_key: str = field(default="", repr=False)

    def bound(self, env: Mapping[str, str]) -> Settings:
        """With what `toolcrib/bind` brought."""
        key = env.get(BRAVE_KEY)
        return replace(self, brave_api_key=key) if key else self


def read(env: Mapping[str, str]) -> Settings:
    return Settings(
        search_provider=env.get(PREFIX + "SEARCH_PROVIDER", "none").strip().lower() or "none",
        searxng_url=env.get(PREFIX + "SEARXNG_URL", "").strip(),
        brave_url=env.get(PREFIX + "BRAVE_URL", "").strip() or BRAVE_URL,
        brave_api_key=env.get(BRAVE_KEY, ""),
    )
