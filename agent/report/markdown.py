"""An answer's Markdown as HTML that loads nothing and links nowhere: raw HTML is shown as text, addresses are written out."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape

from agent.report.plain_text import visible


def as_html(text: str) -> Markup:
    """Headings, lists, tables, emphasis and code are rendered; everything else is text, escaped once."""
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False}).enable("table").disable(["entity", "autolink"])
    parser.add_render_rule("link_open", _nothing)
    parser.add_render_rule("link_close", _link_end)
    parser.add_render_rule("image", _image)
    return Markup(parser.render(visible(text)))  # noqa: S704 - the renderer escapes all text; raw HTML and links are off


def _nothing(_renderer: RendererHTML, _tokens: Sequence[Token], _at: int, _options: OptionsDict, _env: EnvType) -> str:
    return ""


def _link_end(_renderer: RendererHTML, tokens: Sequence[Token], at: int, _options: OptionsDict, _env: EnvType) -> str:
    opened = next((token for token in reversed(tokens[:at]) if token.type == "link_open"), None)
    return f" <code>{escape(str(opened.attrGet('href') or ''))}</code>" if opened else ""


def _image(_renderer: RendererHTML, tokens: Sequence[Token], at: int, _options: OptionsDict, _env: EnvType) -> str:
    """Pictures are shown in the report's own gallery; here stands only which one is meant."""
    token = tokens[at]
    return f"<em>{escape(token.content or 'picture')}</em> <code>{escape(str(token.attrGet('src') or ''))}</code>"
