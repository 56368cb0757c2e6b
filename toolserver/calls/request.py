"""What a caller asks for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallRequest:
    """One request to call a tool. `key` is the Idempotency-Key; times in seconds, None: the server's own.

    `key_id` names the API key. `gone` makes something to await that ends when the caller hangs up. `follow`: nothing is waited
    for, since its caller follows it by events; wait_s bounds only how long it waits for its turn.
    """

    tenant: str
    session_id: str
    tool: str
    arguments: Any
    trace_id: str
    wait_s: float | None = None
    deadline_s: float | None = None
    key: str | None = None
    key_id: str | None = None
    gone: Callable[[], Coroutine[Any, Any, None]] | None = None
    follow: bool = False
