"""PDF to text, page by page, within bounds of pages and time."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

from pypdf import PdfReader
from pypdf.errors import PyPdfError

MAX_PAGES = 300
MAX_SECONDS = 25.0


class UnreadablePdf(Exception):  # noqa: N818 - reads as what it names
    """The message says why."""


def convert(body: bytes) -> dict[str, Any]:
    """`{"title", "text", "pages", "pages_read"}`. Raises UnreadablePdf."""
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = PdfReader(io.BytesIO(body))
        if reader.is_encrypted and not reader.decrypt(""):
            raise UnreadablePdf("the PDF is protected by a password")
        count = len(reader.pages)
        texts = _page_texts(reader, count)
        title = str((reader.metadata or {}).get("/Title") or "").strip()
    except UnreadablePdf:
        raise
    except MemoryError:
        raise
    except (PyPdfError, RecursionError, Exception) as problem:  # a broken file can raise anything inside the reader
        raise UnreadablePdf(f"the PDF is broken ({type(problem).__name__}: {str(problem)[:120]})") from problem
    if not any(text.strip() for text in texts):
        raise UnreadablePdf(f"the PDF has {count} page(s) but no text in them: they are pictures, perhaps scans")
    return {"title": title[:500], "text": "\n\n".join(_headed(texts, count)), "pages": count, "pages_read": len(texts)}


def _page_texts(reader: PdfReader, count: int) -> list[str]:
    end = time.monotonic() + MAX_SECONDS
    texts: list[str] = []
    for index in range(min(count, MAX_PAGES)):
        texts.append(reader.pages[index].extract_text() or "")
        if time.monotonic() > end:
            break
    return texts


def _headed(texts: list[str], count: int) -> list[str]:
    return [f"[page {index} of {count}]\n\n{text.strip()}" for index, text in enumerate(texts, 1)]
