"""Bounds and cleans the output of images that do not bound it themselves: head and tail of all text, small binary blocks only."""

from __future__ import annotations

import json
from typing import Any

MAX_BINARY_BYTES = 4 << 20
MAX_STRUCTURED_BYTES = 1 << 20
MAX_BLOCKS = 1_000
_MARKER = "\n[… {} bytes left out …]\n"
_MARKER_BYTES = 100
Block = dict[str, Any]


def bound(blocks: list[Block], max_text_bytes: int) -> tuple[list[Block], dict[str, Any] | None]:
    """The blocks within the limits, and what is told of what was left out (None: nothing was).

    The text of embedded resources counts as text. What is no block of its kind is replaced by a line that says so.
    """
    surplus, blocks = len(blocks) - MAX_BLOCKS, [_sound(block) for block in blocks[:MAX_BLOCKS]]
    texts = [_text_of(block) for block in blocks]
    total = sum(len(text.encode("utf-8", "replace")) for text in texts if text is not None)
    cuts = _Cuts(total, max_text_bytes)
    kept_text = kept_binary = left_binary = 0
    out: list[Block] = []
    for block, text in zip(blocks, texts, strict=True):
        if text is not None:
            shown = cuts.shown(text)
            kept_text += len(shown.encode("utf-8", "replace"))
            if shown or not text:
                out.append(_with_text(block, shown))
            continue
        size = len(json.dumps(block, ensure_ascii=False))
        if kept_binary + size > MAX_BINARY_BYTES:
            left_binary += size
            out.append(_note(f"A block of kind {block['type'][:40]} of {size} bytes was left out: too large."))
        else:
            kept_binary += size
            out.append(block)
    if surplus > 0:
        out.append(_note(f"{surplus} more blocks were left out: {MAX_BLOCKS} are taken of one result."))
    if total <= max_text_bytes and not left_binary and surplus <= 0:
        return out, None
    kept = min(kept_text, total) + kept_binary
    return out, {"bytes_total": total + kept_binary + left_binary, "bytes_kept": kept, "artifact": None}


class _Cuts:
    """Head and tail of texts that follow each other: told one after the other, each gives what is kept of it."""

    def __init__(self, total: int, limit: int) -> None:
        self._all = total <= limit
        half = max(0, (limit - _MARKER_BYTES) // 2)
        self._head, self._tail = half, total - half  # the first byte that is left out, and the first that is kept again
        self._at = 0
        self._marked = False

    def shown(self, text: str) -> str:
        if self._all:
            return text
        data = text.encode("utf-8", "replace")
        start, self._at = self._at, self._at + len(data)
        head = data[: max(0, self._head - start)].decode("utf-8", "ignore")
        tail = data[max(0, self._tail - start) :].decode("utf-8", "ignore") if self._at > self._tail else ""
        if self._marked or self._at <= self._head:
            return head + tail
        self._marked = True
        return head + _MARKER.format(self._tail - self._head) + tail


def _text_of(block: Block) -> str | None:
    """The text that is bounded as such; None for blocks that have none."""
    if block["type"] == "text":
        return str(block["text"])
    if block["type"] != "resource":
        return None
    text = block["resource"].get("text")
    return text if isinstance(text, str) else None


def _with_text(block: Block, text: str) -> Block:
    if block["type"] == "text":
        return {**block, "text": text}
    return {**block, "resource": {**block["resource"], "text": text}}


def _sound(block: Block) -> Block:
    """The block, or what is said in its place: others may rely on what a block of its kind has."""
    kind, resource = block["type"], block.get("resource")
    sound = {
        "text": lambda: isinstance(block.get("text"), str),
        "image": lambda: isinstance(block.get("data"), str) and isinstance(block.get("mimeType"), str),
        "audio": lambda: isinstance(block.get("data"), str) and isinstance(block.get("mimeType"), str),
        "resource_link": lambda: isinstance(block.get("uri"), str),
        "resource": lambda: (
            isinstance(resource, dict)
            and isinstance(resource.get("uri"), str)
            and (isinstance(resource.get("text"), str) or isinstance(resource.get("blob"), str))
        ),
    }.get(kind)
    return (
        block
        if sound is None or sound()
        else _note(f"A block of kind {kind} was left out: it lacks what such a block has.")
    )


def _note(text: str) -> Block:
    return {"type": "text", "text": f"[{text}]"}


def without_huge_structure(result: dict[str, Any]) -> tuple[dict[str, Any], list[Block]]:
    """The result without a structured part that is too large, and what is said of it then."""
    if "structuredContent" not in result:
        return result, []
    size = len(json.dumps(result["structuredContent"], ensure_ascii=False))
    if size <= MAX_STRUCTURED_BYTES:
        return result, []
    kept = {name: value for name, value in result.items() if name != "structuredContent"}
    return kept, [_note(f"The structured result of {size} bytes was left out: too large.")]
