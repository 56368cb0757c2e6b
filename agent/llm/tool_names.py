"""Names of tools as providers take them, and back: `web.search` is sent as `web_search`, and a call of that is one of it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BAD = re.compile(r"[^A-Za-z0-9_-]")
_MAX = 64


def valid_name(name: str) -> str:
    """`name` as a provider takes it: other characters become `_`, the rest is cut."""
    return _BAD.sub("_", name)[:_MAX] or "unnamed"


def sent_names(names: Iterable[str]) -> dict[str, str]:
    """Each name → what is sent for it. No two are the same; a name that is valid as it stands is kept."""
    wanted = list(dict.fromkeys(names))
    sent = {name: name for name in wanted if valid_name(name) == name}
    taken = set(sent)
    for name in wanted:
        if name in sent:
            continue
        free, number = valid_name(name), 2
        while free in taken:
            free, number = f"{valid_name(name)[: _MAX - 4]}_{number}", number + 1
        sent[name] = free
        taken.add(free)
    return sent
