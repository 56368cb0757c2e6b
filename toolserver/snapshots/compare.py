"""What differs between two snapshots: their manifests merged, both sorted, so that it takes one pass."""

from __future__ import annotations

import base64
from typing import Any

from toolserver.snapshots.manifest import Entry, lines, order, parse

MAX_NAMED = 10_000
_TYPES = {b"f": "file", b"d": "dir", b"l": "symlink"}


def compare(before: bytes, after: bytes) -> dict[str, Any]:
    """{"added", "removed": [{"path", "type", ...}], "changed": [{..., "changes": [...]}], "truncated"}. Raises NotAManifest."""
    added: list[dict[str, Any]] = []
    removed: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    left, right = lines(before), lines(after)
    old, new = next(left, None), next(right, None)
    truncated = False
    while (old is not None or new is not None) and not truncated:
        if old == new:
            old, new = next(left, None), next(right, None)
            continue
        ours = parse(old) if old is not None else None
        theirs = parse(new) if new is not None else None
        ahead = _ahead(ours, theirs)
        if ahead == 0 and ours is not None and theirs is not None:
            changed.append({**told(theirs), "changes": changes(ours, theirs), "before": told(ours)})
        elif ahead < 0 and ours is not None:
            removed.append(told(ours))
        elif theirs is not None:
            added.append(told(theirs))
        if ahead <= 0:
            old = next(left, None)
        if ahead >= 0:
            new = next(right, None)
        truncated = len(added) + len(removed) + len(changed) >= MAX_NAMED and (old is not None or new is not None)
    return {"added": added, "removed": removed, "changed": changed, "truncated": truncated}


def _ahead(ours: Entry | None, theirs: Entry | None) -> int:
    """-1: only the first has this path, 1: only the second, 0: both."""
    if ours is None:
        return 1
    if theirs is None:
        return -1
    if ours.path == theirs.path:
        return 0
    return -1 if order(ours.path) < order(theirs.path) else 1


def changes(ours: Entry, theirs: Entry) -> list[str]:
    """`type`, or which of `content`, `mode`, `target`."""
    if ours.kind != theirs.kind:
        return ["type"]
    found = []
    if (ours.size, ours.content) != (theirs.size, theirs.content):
        found.append("content")
    if ours.target != theirs.target:
        found.append("target")
    if ours.mode != theirs.mode:
        found.append("mode")
    return found


def told(entry: Entry) -> dict[str, Any]:
    """An entry for clients. Bytes of names that are no UTF-8 are shown as backslash, x and two digits, with the exact bytes beside."""
    shown: dict[str, Any] = {**_named("path", entry.path), "type": _TYPES[entry.kind]}
    if entry.kind == b"l":
        return {**shown, **_named("target", entry.target)}
    shown["mode"] = entry.mode
    if entry.kind == b"f":
        shown["bytes"] = entry.size
    return shown


def _named(field: str, name: bytes) -> dict[str, str]:
    try:
        return {field: name.decode("utf-8")}
    except UnicodeDecodeError:
        exact = base64.b64encode(name).decode("ascii")
        return {field: name.decode("utf-8", "backslashreplace"), f"{field}_base64": exact}
