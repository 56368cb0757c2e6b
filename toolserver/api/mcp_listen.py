"""Streams that stay open to tell of changes of the tool list."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from toolserver.catalog.image import Tool

_LOOK_S = 1.0
_PING_LOOKS = 10


async def changes(tools: Callable[[], Sequence[Tool]], goes_on: Callable[[], bool]) -> AsyncIterator[bool]:
    """True whenever the list is another one than before, False now and then when nothing is new; until `goes_on` says no."""
    known = tools()
    quiet = 0
    while goes_on():
        await asyncio.sleep(_LOOK_S)
        found = tools()
        quiet += 1
        if found != known:
            known, quiet = found, 0
            yield True
        elif quiet >= _PING_LOOKS:
            quiet = 0
            yield False
