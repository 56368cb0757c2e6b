"""What a caller gets: a status and the bytes of a body, as they are stored and sent again."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from toolserver.errors import ToolServerError


def encode_body(body: Any) -> bytes:
    """Valid UTF-8 always: a lone surrogate becomes a question mark. Raises ValueError for NaN and the infinities."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")


@dataclass(frozen=True)
class Answer:
    """`replayed`: it was stored under the caller's Idempotency-Key before."""

    status: int
    body: bytes
    replayed: bool = False

    @classmethod
    def of(cls, status: int, body: Any) -> Answer:
        return cls(status, encode_body(body))

    @classmethod
    def refusal(cls, error: ToolServerError, trace_id: str) -> Answer:
        return cls(error.status, encode_body({"detail": error.detail(trace_id)}))

    def again(self) -> Answer:
        return replace(self, replayed=True)

    def json(self) -> Any:
        return json.loads(self.body)
