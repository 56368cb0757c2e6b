"""The worker's lease: a server that lives is heard now and then; when it is not, the worker ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from sandbox_images.base.annotations import Any, Protocol
from sandbox_images.base.mcp_stdio import INVALID_PARAMS, ProtocolError

FIRST_LEASE_S = 900.0  # until a server says otherwise


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Lease:
    """Calls `on_over` once nothing was `heard` for the time of the lease."""

    def __init__(self, call_later: CallLater, on_over: Callable[[], None]) -> None:
        self._call_later, self._on_over = call_later, on_over
        self._seconds, self._heard = FIRST_LEASE_S, time.monotonic()
        self._timer = call_later(self._seconds, self._look)

    def heard(self) -> None:
        self._heard = time.monotonic()

    def renew(self, seconds: Any) -> None:
        """`seconds` of None leaves the time of the lease as it is. Raises ProtocolError when it is no positive number."""
        if seconds is None:
            return
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 < seconds < float("inf"):
            raise ProtocolError(INVALID_PARAMS, "lease_s must be a positive number of seconds")
        self._seconds = seconds
        self._timer.cancel()
        self._look()

    def _look(self) -> None:
        left = self._heard + self._seconds - time.monotonic()
        if left <= 0:
            self._on_over()
        else:
            self._timer = self._call_later(left, self._look)
