"""Search providers: how a query is put to each, and how its answer is read. A new one is a class here and a row in PROVIDERS."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlencode

from sandbox_images.web.settings import Settings


@dataclass(frozen=True)
class Hit:
    title: str
    url: str
    snippet: str


@dataclass(frozen=True)
class Question:
    """The request that asks a provider. headers may hold its key: never show them."""

    url: str
    headers: Mapping[str, str]


class Provider(Protocol):
    def missing(self, settings: Settings) -> str | None:
        """The server's settings that must be set before this provider can be used, or None."""

    def question(self, settings: Settings, query: str, count: int) -> Question: ...

    def hits(self, answer: dict[str, Any]) -> list[Hit]:
        """Raises KeyError, TypeError or AttributeError for an answer of another shape."""


class SearxNG:
    def missing(self, settings: Settings) -> str | None:
        return None if settings.searxng_url else "TOOLSERVER_WEB__SEARXNG_URL"

    def question(self, settings: Settings, query: str, count: int) -> Question:  # noqa: ARG002 - its API has no count
        base = settings.searxng_url.rstrip("/").removesuffix("/search")
        return Question(f"{base}/search?{urlencode({'q': query, 'format': 'json'})}", {"Accept": "application/json"})

    def hits(self, answer: dict[str, Any]) -> list[Hit]:
        return [_hit(item["title"], item["url"], item.get("content")) for item in answer["results"]]


class Brave:
    def missing(self, settings: Settings) -> str | None:
        return None if settings.brave_api_key else "TOOLSERVER_WEB__BRAVE_API_KEY"

    def question(self, settings: Settings, query: str, count: int) -> Question:
        headers = {"Accept": "application/json", "X-Subscription-Token": settings.brave_api_key}
        return Question(f"{settings.brave_url}?{urlencode({'q': query, 'count': count})}", headers)

    def hits(self, answer: dict[str, Any]) -> list[Hit]:
        if "web" not in answer and answer.get("type") == "search":
            return []
        return [_hit(item["title"], item["url"], item.get("description")) for item in answer["web"]["results"]]


PROVIDERS: dict[str, Provider] = {"searxng": SearxNG(), "brave": Brave()}


def _hit(title: str, url: str, snippet: str | None) -> Hit:
    return Hit(_plain(title, 300), url.strip()[:2_000], _plain(snippet or "", 600))


def _plain(text: str, limit: int) -> str:
    """Providers mark what was found with tags."""
    return " ".join(html.unescape(re.sub(r"</?[a-zA-Z][^<>]{0,100}>", "", text)).split())[:limit]
