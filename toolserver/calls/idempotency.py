"""The Idempotency-Key: its form, what it stands for, and what a repeated one gets."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from typing import Any

from toolserver.errors import Code, ToolServerError, invalid

_KEY = re.compile(r"[A-Za-z0-9_-]{1,128}")


def check_key(text: str | None) -> str | None:
    """Raises invalid_arguments."""
    if text is not None and _KEY.fullmatch(text) is None:
        raise invalid("Idempotency-Key", "must be 1 to 128 of letters, digits, - and _")
    return text


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def request_hash(session_id: str, tool: str, arguments: Any, deadline_s: float | None) -> str:
    """Of all that decides what runs. How long the caller waits for it does not."""
    told = json.dumps(
        [session_id, tool, arguments, deadline_s], sort_keys=True, ensure_ascii=True, separators=(",", ":")
    )
    return hashlib.sha256(told.encode()).hexdigest()


def conflict(call_id: str) -> ToolServerError:
    return ToolServerError(
        Code.IDEMPOTENCY_CONFLICT,
        f"The Idempotency-Key {call_id} was used for another request (session, tool, arguments or deadline_s differ). Nothing was "
        "run. Use a new key for a new call, or send the same request to get its stored answer.",
        call_id,
    )
