"""The tools of this image, put together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sandbox_images.base.outcome import Outcome
from sandbox_images.base.progress import Progress
from sandbox_images.web.converter import Converter
from sandbox_images.web.settings import Settings
from sandbox_images.web.web_fetch import WebFetch
from sandbox_images.web.web_search import WebSearch

_Tool = Callable[[dict[str, Any], Progress, int], Awaitable[Outcome]]


class Toolset:
    """Owns the converting process: call `close` at the end."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._converter = Converter()
        self._tools: dict[str, _Tool] = {
            "web_fetch": WebFetch(self._converter),
            "web_search": WebSearch(settings),
        }

    async def call(self, name: str, arguments: dict[str, Any], progress: Progress, max_text_bytes: int) -> Outcome:
        """Raises Ended. Cancelling stops the work."""
        return await self._tools[name](arguments, progress, max_text_bytes)

    async def close(self) -> None:
        await self._converter.close()
