"""Prompts are Markdown files in `prompts/`, with named places such as {{goal}}. Values are put in once, never read again."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_PLACE = re.compile(r"\{\{(\w+)\}\}")


@cache
def _text(name: str) -> str:
    return (files("agent.roles") / "prompts" / f"{name}.md").read_text("utf-8").strip()


def places(name: str) -> frozenset[str]:
    return frozenset(_PLACE.findall(_text(name)))


def render(name: str, **values: str) -> str:
    """The prompt with every place filled. Raises KeyError for a place without a value and ValueError for the reverse."""
    unused = set(values) - places(name)
    if unused:
        raise ValueError(f"prompt {name} has no place for {', '.join(sorted(unused))}")
    return _PLACE.sub(lambda found: values[found[1]], _text(name))
