"""Pages read a moment ago, so that asking for the next part gets it from the same text and costs no second download."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sandbox_images.web.web_fetch import Document

MAX_PAGES = 4
MAX_CHARS = 2_000_000  # a longer text is read again
MAX_AGE_S = 300.0


class Recent:
    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[float, Document]] = OrderedDict()

    def get(self, key: tuple[str, str]) -> Document | None:
        read_at, document = self._kept.get(key, (0.0, None))
        return document if document is not None and time.monotonic() - read_at < MAX_AGE_S else None

    def put(self, key: tuple[str, str], document: Document) -> None:
        self._kept.pop(key, None)
        if document.text is not None and len(document.text) <= MAX_CHARS:
            self._kept[key] = (time.monotonic(), document)
        while len(self._kept) > MAX_PAGES:
            self._kept.popitem(last=False)
