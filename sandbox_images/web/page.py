"""HTML to Markdown or plain text: the title, the main content, absolute links."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

from bs4 import BeautifulSoup, Tag
from bs4.element import CData, PreformattedString
from markdownify import ATX, MarkdownConverter

_NO_TEXT = (
    "head", "title", "script", "style", "noscript", "template", "svg", "iframe", "object", "embed", "canvas", "select", "button", "input",
    "textarea", "dialog",
)  # fmt: skip
_AROUND = ("nav", "header", "footer", "aside", "form")
_AROUND_ROLES = ("navigation", "banner", "contentinfo", "complementary", "search", "menu")
_BLOCKS = (
    "p", "div", "section", "article", "li", "ul", "ol", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "blockquote",
    "figure", "figcaption", "dl", "dt", "dd", "hr", "main", "address", "details", "summary",
)  # fmt: skip
_MAIN_SHARE = 0.25  # of the page's text; a smaller <main> is taken for a mistake
_MAIN_CHARS = 150


_MARKDOWN: dict[str, Any] = {  # without escapes in running text: it is read by models, not rendered
    "heading_style": ATX,
    "bullets": "-",
    "escape_misc": False,
    "escape_asterisks": False,
    "escape_underscores": False,
    "table_infer_header": True,
}


def convert(html: str, base_url: str, style: str) -> dict[str, Any]:
    """`{"title", "text"}` of a page; `style` is `markdown` or `text`. Relative links are resolved against `base_url`."""
    soup = BeautifulSoup(html, "html.parser")
    title = _title(soup)
    base = soup.find("base", href=True)
    if isinstance(base, Tag):
        base_url = urljoin(base_url, str(base["href"]))
    for useless in soup(list(_NO_TEXT)):
        useless.decompose()
    for aside in soup.find_all(
        string=lambda text: isinstance(text, PreformattedString) and not isinstance(text, CData)
    ):
        aside.extract()  # comments, the doctype, an XML declaration
    content = _main_content(soup)
    if style == "text":
        return {"title": title, "text": _plain(content)}
    _absolute(content, base_url)
    try:
        text = str(MarkdownConverter(**_MARKDOWN).convert_soup(content))
    except RecursionError:
        text = _plain(content)  # absurdly nested
    return {"title": title, "text": _tidy(text)}


def _title(soup: BeautifulSoup) -> str:
    candidates = (soup.title, soup.find("meta", property="og:title"), soup.find("h1"))
    for found in candidates:
        if isinstance(found, Tag):
            text = str(found.get("content", "")) if found.name == "meta" else found.get_text(" ")
            text = " ".join(text.split())
            if text:
                return text[:500]
    return ""


def _main_content(soup: BeautifulSoup) -> Tag:
    body = soup.body or soup
    whole = _size(body)
    candidates = [*soup.find_all("main"), *soup.find_all(role="main")] or soup.find_all("article")
    if len(candidates) == 1 and _size(candidates[0]) >= max(_MAIN_CHARS, _MAIN_SHARE * whole):
        return candidates[0]
    for around in [*body.find_all(list(_AROUND)), *body.find_all(role=list(_AROUND_ROLES))]:
        if not around.decomposed and whole - _size(around) >= max(_MAIN_CHARS, _MAIN_SHARE * whole):
            around.decompose()  # unless it is nearly all there is
    return body


def _size(part: Tag) -> int:
    return sum(len(text.strip()) for text in part.strings)


def _absolute(content: Tag, base_url: str) -> None:
    for link in content.find_all("a", href=True):
        target = _joined(base_url, str(link["href"]))
        if target is None or (not link.get_text(strip=True) and not link.find("img")):
            link.unwrap()
        else:
            link["href"] = target
    for image in content.find_all("img"):
        source = _joined(base_url, str(image.get("src") or image.get("data-src") or ""))
        if source is None or not image.get("alt"):
            image.replace_with(str(image.get("alt") or ""))
        else:
            image["src"] = source


def _joined(base_url: str, reference: str) -> str | None:
    reference = reference.strip()
    if not reference or reference.lower().startswith(("javascript:", "data:", "vbscript:", "blob:")):
        return None
    try:
        return urljoin(base_url, reference)
    except ValueError:
        return reference


def _plain(content: Tag) -> str:
    for block in content.find_all(_BLOCKS):
        block.insert_before("\n")
        block.append("\n")
    for cell in content.find_all(["td", "th"]):
        cell.append(" ")
    for line_break in content.find_all("br"):
        line_break.replace_with("\n")
    lines = (" ".join(line.split()) for line in content.get_text().split("\n"))
    return _tidy("\n".join(lines))


def _tidy(text: str) -> str:
    text = re.sub(r"[ \t\xa0]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()
