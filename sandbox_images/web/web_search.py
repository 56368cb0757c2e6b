"""The tool `web_search`: asks the provider that the operator configured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sandbox_images.base.outcome import Ended, Outcome, clip_bytes, failed, invalid
from sandbox_images.base.progress import Progress
from sandbox_images.web.fetch import Bounds, Page, fetch
from sandbox_images.web.providers import PROVIDERS, Hit, Provider, Question
from sandbox_images.web.settings import Settings
from sandbox_images.web.web_address import parse

TOTAL_TIMEOUT_S = 30.0
MAX_QUERY_CHARS = 400
DEFAULT_RESULTS = 8
MAX_RESULTS = 20
_BOUNDS = Bounds(text_bytes=2 << 20, pdf_bytes=2 << 20, hops=0)  # no redirects: the key stays where it belongs


class WebSearch:
    """`settings` is asked anew for each call: a key may be bound after the start."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._settings = settings

    async def __call__(self, arguments: dict[str, Any], progress: Progress, max_text_bytes: int) -> Outcome:
        """Raises Ended."""
        query, count = _wanted(arguments)
        settings = self._settings()
        name, provider = _provider(settings)
        page = await self._ask(name, provider.question(settings, query, count), progress)
        hits = _hits(name, provider, page)[:count]
        structured = {"query": query, "provider": name, "results": [asdict(hit) for hit in hits]}
        text = "\n\n".join(
            f"{index}. [{hit.title or hit.url}]({hit.url})\n   {hit.snippet}".rstrip()
            for index, hit in enumerate(hits, 1)
        )
        return Outcome(
            "done", texts=[clip_bytes(text, max_text_bytes) or f"No results for {query!r}."], structured=structured
        )

    async def _ask(self, name: str, question: Question, progress: Progress) -> Page:
        try:
            async with asyncio.timeout(TOTAL_TIMEOUT_S):
                return await fetch(parse(question.url), progress, _BOUNDS, question.headers)
        except TimeoutError as problem:
            raise failed(f"The search provider {name} did not answer within {TOTAL_TIMEOUT_S:.0f} s.") from problem
        except Ended as ended:
            outcome = ended.outcome
            outcome.end = (
                "denied" if outcome.end == "denied" else "failed"
            )  # its address is the operator's, not the caller's
            outcome.message = f"The search provider {name} could not be asked. {outcome.message}"
            raise


def _wanted(arguments: dict[str, Any]) -> tuple[str, int]:
    query, count = arguments.get("query"), arguments.get("max_results", DEFAULT_RESULTS)
    if not isinstance(query, str) or not query.strip():
        raise invalid("/query", "must be a string that is not empty")
    if len(query) > MAX_QUERY_CHARS:
        raise invalid("/query", f"must have at most {MAX_QUERY_CHARS} characters")
    if (
        isinstance(count, bool)
        or not isinstance(count, (int, float))
        or count != int(count)
        or not 1 <= count <= MAX_RESULTS
    ):
        raise invalid("/max_results", f"must be an integer from 1 to {MAX_RESULTS}")
    return query.strip(), int(count)


def _provider(settings: Settings) -> tuple[str, Provider]:
    name = settings.search_provider
    if name == "none":
        raise failed(
            "No search provider is configured. The operator of the ToolServer sets TOOLSERVER_WEB__SEARCH_PROVIDER to searxng (with "
            "TOOLSERVER_WEB__SEARXNG_URL) or to brave (with TOOLSERVER_WEB__BRAVE_API_KEY). Until then use web_fetch with a known address."
        )
    provider = PROVIDERS.get(name)
    if provider is None:
        raise failed(
            f"There is no search provider {name[:40]!r}. TOOLSERVER_WEB__SEARCH_PROVIDER can be {', '.join(PROVIDERS)} or none."
        )
    missing = provider.missing(settings)
    if missing is not None:
        raise failed(f"The search provider {name} needs {missing}, which the operator of the ToolServer has not set.")
    return name, provider


def _hits(name: str, provider: Provider, page: Page) -> list[Hit]:
    if page.status == 429:
        raise failed(
            f"The search provider {name} answered with the HTTP status 429: too many requests. Wait before searching again."
        )
    if page.status in (401, 403):
        hint = " and that its JSON format is enabled" if name == "searxng" else ""
        raise failed(
            f"The search provider {name} refused with the HTTP status {page.status}. The operator should check its key{hint}."
        )
    if page.status != 200:
        raise failed(
            f"The search provider {name} answered with the HTTP status {page.status} {page.reason}".rstrip() + "."
        )
    try:
        answer = json.loads(page.body)
    except (ValueError, RecursionError) as problem:
        what = page.content_type or "something without a content type"
        raise failed(
            f"The search provider {name} answered with {what} that is not JSON. Is its address that of the search API?"
        ) from problem
    try:
        return provider.hits(answer)
    except (KeyError, TypeError, AttributeError) as problem:
        raise failed(f"The search provider {name} answered with JSON of an unknown shape.") from problem
