"""The Idempotency-Key: its form, what it stands for, and what a repeated one gets."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import Any

from toolserver.errors import Code, ToolServerError

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode
_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")
KEY_FORM = "must be 1 to 128 of letters, digits, - and _"


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def canonical(value: Any) -> str:
    """JSON that is the same text for the same value."""
    return _encode(value)


def request_hash(session_id: str, tool: str, arguments: str, deadline_s: float | None) -> str:
    """Of all that decides what runs; `arguments` is canonical. How long the caller waits for it does not."""
    told = f"[{_encode(session_id)},{_encode(tool)},{arguments},{_encode(deadline_s)}]"
    return hashlib.sha256(told.encode()).hexdigest()


def conflict(call_id: str) -> ToolServerError:
    return ToolServerError(
        Code.IDEMPOTENCY_CONFLICT,
        f"The Idempotency-Key {call_id} was used for another request (session, tool, arguments or deadline_s differ). Nothing was "
        "run. Use a new key for a new call, or send the same request to get its stored answer.",
        call_id,
    )
