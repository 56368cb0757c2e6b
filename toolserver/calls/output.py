"""Bounds the output of images that do not bound it themselves: head and tail of the text, small binary blocks only."""

from __future__ import annotations

import json
from typing import Any

MAX_BINARY_BYTES = 4 << 20
MAX_STRUCTURED_BYTES = 1 << 20


def bound(blocks: list[dict[str, Any]], max_text_bytes: int) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The blocks within the limits, and what is told of what was left out (None: nothing was)."""
    texts = [block for block in blocks if block.get("type") == "text" and isinstance(block.get("text"), str)]
    total = sum(len(block["text"].encode("utf-8", "replace")) for block in texts)
    kept_binary, left_binary = 0, 0
    out: list[dict[str, Any]] = []
    text_left = max_text_bytes
    kept_text = 0
    for block in blocks:
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            if total <= max_text_bytes:
                out.append(block)
                continue
            shown = _head_and_tail(block["text"], text_left)
            size = len(shown.encode("utf-8", "replace"))
            text_left = max(0, text_left - size)
            kept_text += size
            if shown:
                out.append({**block, "text": shown})
            continue
        size = len(json.dumps(block, ensure_ascii=False))
        if kept_binary + size > MAX_BINARY_BYTES:
            left_binary += size
            out.append(
                {
                    "type": "text",
                    "text": f"[A block of kind {str(block.get('type'))[:40]} of {size} bytes was left out: too large.]",
                }
            )
        else:
            kept_binary += size
            out.append(block)
    if total <= max_text_bytes and not left_binary:
        return out, None
    kept = (total if total <= max_text_bytes else kept_text) + kept_binary
    return out, {"bytes_total": total + kept_binary + left_binary, "bytes_kept": kept, "artifact": None}


def _head_and_tail(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    if limit < 200:
        return ""
    half = (limit - 100) // 2
    left_out = len(data) - 2 * half
    head, tail = data[:half].decode("utf-8", "ignore"), data[-half:].decode("utf-8", "ignore")
    return f"{head}\n[… {left_out} bytes left out …]\n{tail}"


def structured_fits(value: Any) -> bool:
    return len(json.dumps(value, ensure_ascii=False)) <= MAX_STRUCTURED_BYTES
