"""The tool `web_fetch`: one page as Markdown, text or as it is, a part at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from sandbox_images.base.outcome import Outcome, clip_bytes, failed, invalid
from sandbox_images.base.progress import Progress
from sandbox_images.web.converter import Converter
from sandbox_images.web.fetch import Bounds, Page, fetch
from sandbox_images.web.recent import Recent
from sandbox_images.web.web_address import parse

TOTAL_TIMEOUT_S = 90.0
STYLES = ("markdown", "text", "raw")
MAX_CHARS = 200_000
DEFAULT_CHARS = 20_000
EXCERPT_CHARS = 1_000
_NOTE_BYTES = 1_024  # kept free for the lines around the text


@dataclass(frozen=True)
class Wanted:
    url: str
    style: str = "markdown"
    start: int = 0
    max_chars: int = DEFAULT_CHARS


@dataclass
class Document:
    """A page that was read. text is None for what has none (pictures, archives)."""

    page: Page
    style: str
    title: str
    text: str | None
    details: dict[str, Any] = field(default_factory=dict)
    cut: bool = False


def wanted(arguments: dict[str, Any]) -> Wanted:
    """Raises Ended `invalid`. The server checked the schema; other clients may not have."""
    url, style = arguments.get("url"), arguments.get("format", "markdown")
    start, count = arguments.get("start", 0), arguments.get("max_chars", DEFAULT_CHARS)
    if not isinstance(url, str):
        raise invalid("/url", "must be a string")
    if style not in STYLES:
        raise invalid("/format", f"must be one of {', '.join(STYLES)}")
    for pointer, value, low in (("/start", start, 0), ("/max_chars", count, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < low:
            raise invalid(pointer, f"must be an integer of at least {low}")
    return Wanted(url, style, int(start), min(int(count), MAX_CHARS))


class WebFetch:
    def __init__(self, converter: Converter) -> None:
        self._converter, self._recent = converter, Recent()

    async def __call__(self, arguments: dict[str, Any], progress: Progress, max_text_bytes: int) -> Outcome:
        """Raises Ended."""
        asked = wanted(arguments)
        document = self._recent.get((asked.url, asked.style)) if asked.start else None
        if document is None:
            document = await self._read(asked, progress)
        return _outcome(document, asked, max_text_bytes)

    async def _read(self, asked: Wanted, progress: Progress) -> Document:
        address = parse(asked.url)
        try:
            async with asyncio.timeout(TOTAL_TIMEOUT_S):
                page = await fetch(address, progress, Bounds())
                progress.note = f"Converting {len(page.body):,} bytes of {page.url}"
                document = await self._document(page, asked.style)
        except TimeoutError as problem:
            raise failed(f"{address} was not read within {TOTAL_TIMEOUT_S:.0f} s. {progress.note}.") from problem
        page.body = b""
        self._recent.put((asked.url, asked.style), document)
        return document

    async def _document(self, page: Page, style: str) -> Document:
        size = len(page.body)
        binary = not page.body and page.cut
        read = {"kind": "binary"} if binary else await self._converter.convert(page, style)
        known = page.declared_bytes if binary or (page.cut and page.declared_bytes) else size
        details = {"kind": read["kind"], "bytes": known, "encoding": read.get("encoding")}
        details.update({name: read[name] for name in ("pages", "pages_read") if name in read})
        document = Document(
            page,
            style,
            read.get("title", ""),
            read.get("text"),
            details,
            cut=not binary and (page.cut or bool(read.get("shortened"))),
        )
        if page.status >= 400:
            raise _http_error(document)
        if page.cut and read["kind"] == "pdf":
            raise failed(f"{page.url} is a PDF of more than {size:,} bytes, which is too large to be read.")
        return document


def _http_error(document: Document) -> Exception:
    page = document.page
    excerpt = (document.text or "").strip()[:EXCERPT_CHARS]
    status = f"{page.status} {page.reason}".strip()
    return failed(
        f"{page.url} answered with the HTTP status {status}: this is the server's error, not the page that was asked for.",
        texts=[
            f"HTTP status {status} from {page.url}",
            f"The server's error page begins: {excerpt}" if excerpt else "",
        ],
        structured=_structured(document),
    )


def _structured(document: Document) -> dict[str, Any]:
    page = document.page
    return {
        "url": page.redirects[0] if page.redirects else page.url,
        "final_url": page.url,
        "redirects": page.redirects[1:],
        "status": page.status,
        "content_type": page.content_type,
        "title": document.title,
        "format": document.style,
        "cut": document.cut,
        **document.details,
    }


def _outcome(document: Document, asked: Wanted, max_text_bytes: int) -> Outcome:
    page, structured = document.page, _structured(document)
    if document.text is None:
        known = document.details["bytes"]
        size = "of unknown size" if known is None else f"of {known:,} bytes"
        what = page.content_type or "unknown type"
        return Outcome(
            "done",
            texts=[f"{page.url} (status {page.status}) is {what} {size}: not text, so there is nothing to show."],
            structured=structured,
        )
    total = len(document.text)
    if asked.start > total:
        raise invalid("/start", f"is past the end: the text has {total} characters")
    text = clip_bytes(
        document.text[asked.start : asked.start + asked.max_chars],
        max(max_text_bytes - _NOTE_BYTES - len(page.url.encode()), 256),
    )
    end = asked.start + len(text)
    structured |= {"start": asked.start, "end": end, "total_chars": total, "next_start": end if end < total else None}
    return Outcome(
        "done", texts=[_heading(document), text, _ending(document, asked, end, total)], structured=structured
    )


def _heading(document: Document) -> str:
    page = document.page
    first = page.redirects[0] if page.redirects else page.url
    elsewhere = ", another host" if urlsplit(first).hostname != urlsplit(page.url).hostname else ""
    moved = f" (redirected from {first[:300]}{elsewhere})" if page.redirects else ""
    parts = [f"{page.url}{moved}", f"status {page.status}", page.content_type or "no content type", document.title]
    return " · ".join(part for part in parts if part)


def _ending(document: Document, asked: Wanted, end: int, total: int) -> str:
    notes = []
    if total == 0:
        notes.append("The page has no text.")
    if end < total:
        notes.append(f"Characters {asked.start} to {end} of {total}. To go on, call again with start={end}.")
    if document.cut:
        notes.append("The page is longer than what is read at most; its end is missing.")
    pages, read = document.details.get("pages"), document.details.get("pages_read")
    if pages is not None and read is not None and read < pages:
        notes.append(f"Only the first {read} of {pages} pages were read.")
    return " ".join(notes)
