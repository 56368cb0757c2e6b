"""What an added image offers, judged: which of its tools can be had, which are refused and why, and how two lists differ."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolserver.catalog.hidden_text import escaped, hidden_characters, suspicions, texts
from toolserver.catalog.image import Tool
from toolserver.catalog.schema import schema_problem
from toolserver.tool_entry import ToolEntry

MAX_TOOLS = 1_000
MAX_DESCRIPTION = 20_000
MAX_SCHEMA_BYTES = 256 << 10
MAX_NAME = 128
_PINNED = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")
_PUBLIC = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True)
class Judged:
    """`tools` have their own names still. `refused`: own name to why. `warnings`: of tools that are offered all the same."""

    tools: list[Tool] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)


def pinned(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each entry of `tools/list` what is pinned, in the order of their names."""
    kept = [{key: one[key] for key in _PINNED if one.get(key) is not None} for one in listed]
    return sorted(kept, key=lambda one: str(one.get("name")))


def pin(listed: list[dict[str, Any]]) -> str:
    """A digest of the list: the same for the same tools in any order."""
    told = json.dumps(pinned(listed), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(told.encode()).hexdigest()


def judge(image: str, entry: ToolEntry, listed: list[dict[str, Any]]) -> Judged:
    """Never raises, whatever the image said."""
    judged = Judged()
    if len(listed) > MAX_TOOLS:
        judged.refused["*"] = f"there are {len(listed)} tools; those after the first {MAX_TOOLS} are not offered"
    seen: set[str] = set()
    for one in listed[:MAX_TOOLS]:
        name = one.get("name")
        shown = escaped(str(name))[:MAX_NAME]
        if entry.allow is not None and name not in entry.allow:
            continue
        problem = _name_problem(name, seen)
        if problem is None:
            seen.add(str(name))
            try:
                judged.tools.append(_tool(image, entry, one, judged.warnings))
                continue
            except _Unfit as why:
                problem = str(why)
        judged.refused[shown] = problem
    return judged


class _Unfit(Exception):  # noqa: N818 - private to this file
    pass


def _name_problem(name: Any, seen: Collection[str]) -> str | None:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        return f"its name is not a text of 1 to {MAX_NAME} characters"
    if hidden_characters(name):
        return "its name holds characters that can't be seen"
    if name in seen:
        return "there is a tool of that name already in the image"
    return None


def _tool(image: str, entry: ToolEntry, one: dict[str, Any], warnings: dict[str, list[str]]) -> Tool:
    name = str(one["name"])
    override = entry.override.get(name)
    annotations = one.get("annotations")
    annotations = dict(annotations) if isinstance(annotations, dict) else {}
    title = (override.title if override else None) or one.get("title") or annotations.get("title")
    if isinstance(title, str):
        annotations["title"] = title
    description = (override.description if override else None) or one.get("description")
    if not isinstance(description, str) or not description.strip():
        description = title if isinstance(title, str) and title.strip() else f"The tool {name} of {image}."
        warnings.setdefault(name, []).append("it has no description")
    if len(description) > MAX_DESCRIPTION:
        raise _Unfit(f"its description has {len(description)} characters; at most {MAX_DESCRIPTION} are taken")
    schema = _schema("inputSchema", one.get("inputSchema", {}))
    output: dict[str, Any] | None = None
    if one.get("outputSchema") is not None:
        try:
            output = _schema("outputSchema", one["outputSchema"])
        except _Unfit as why:
            warnings.setdefault(name, []).append(f"{why}; its results are not checked")
    hidden = sorted(
        {sign for text in (description, *texts([annotations, schema, output])) for sign in hidden_characters(text)}
    )
    if hidden:
        raise _Unfit(
            f"its texts hold characters that can't be seen ({', '.join(hidden[:8])}), as attacks on models do: "
            f"{escaped(description)[:300]!r}"
        )
    told = [why for text in (description, *texts(schema)) for why in suspicions(text)]
    if told:
        warnings.setdefault(name, []).extend(dict.fromkeys(told))
    return Tool(name, description, schema, output, annotations, image)


def _schema(which: str, schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise _Unfit(f"its {which} is not an object")
    told: dict[str, Any] = schema if "type" in schema else {**schema, "type": "object"}
    if told["type"] != "object":
        raise _Unfit(f'its {which} has a "type" other than "object"')
    try:
        size = len(json.dumps(told))
    except (ValueError, RecursionError):
        raise _Unfit(f"its {which} is nested too deeply") from None
    if size > MAX_SCHEMA_BYTES:
        raise _Unfit(f"its {which} has {size} bytes; at most {MAX_SCHEMA_BYTES} are taken")
    problem = schema_problem(told)
    if problem is not None:
        raise _Unfit(f"{which}: {problem}")
    return told


def public_names(
    image: str,
    own_names: Collection[str],
    renamed: Mapping[str, str],
    earlier: Mapping[str, str],
    taken: Collection[str],
) -> dict[str, str]:
    """What the tools are called here. A name that was given once stays; a new one is the tool's own, or `image.tool` where that is
    taken by an image that was there before, or has other characters than names here have. Names of tools that went stay, too.
    """
    names = dict(earlier)
    for own in own_names:
        wanted = renamed.get(own)
        kept = names.pop(own, None)
        if kept is not None and kept not in taken and wanted in (None, kept):
            names[own] = kept
            continue
        plain = wanted or (own if _PUBLIC.fullmatch(own) else re.sub(r"[^A-Za-z0-9_.-]+", "_", own))
        others = {name for name in renamed.values() if name != wanted}
        names[own] = _free(plain, image, {*taken, *names.values(), *others})
    return names


def _free(plain: str, image: str, used: Collection[str]) -> str:
    if plain not in used:
        return plain
    prefixed = f"{image}.{plain}"[:MAX_NAME]
    if prefixed not in used:
        return prefixed
    return next(name for n in range(2, 10_000) if (name := f"{prefixed[: MAX_NAME - 5]}_{n}") not in used)


def difference(earlier: list[dict[str, Any]], later: list[dict[str, Any]]) -> list[str]:
    """Both lists as readable text, and the lines of a unified diff between them; empty when nothing that is pinned differs."""
    return list(difflib.unified_diff(_lines(earlier), _lines(later), "approved", "found", lineterm="", n=3))


def changes(earlier: list[dict[str, Any]], later: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names of tools that were added, removed and changed."""
    old = {str(one.get("name")): one for one in pinned(earlier)}
    new = {str(one.get("name")): one for one in pinned(later)}
    return {
        "added": sorted(new.keys() - old.keys()),
        "removed": sorted(old.keys() - new.keys()),
        "changed": sorted(name for name in old.keys() & new.keys() if old[name] != new[name]),
    }


def _lines(listed: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for one in pinned(listed):
        lines.append(f"tool {escaped(str(one.get('name')))}")
        for key in _PINNED[1:]:
            if key in one:
                value = one[key]
                text = (
                    value if isinstance(value, str) else json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
                )
                lines.append(f"  {key}:")
                lines += [f"    {line}" for line in escaped(text).split("\n")]
    return lines
