"""What a tool tells in the midst of a call, for any number of followers: how far it is, and its log."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
KEPT_LOGS = 100
_MAX_MESSAGE, _MAX_LOGGER = 2000, 200


class News:
    """What followers wait for beside the answer: `changed` is done at the next piece of it, and replaced by another.

    `progress` is the last word of the tool on how far it is. A slow follower misses what came in between, and of the log what is
    further back than KEPT_LOGS. `logged` counts all that was logged.
    """

    def __init__(self) -> None:
        self.progress: dict[str, Any] | None = None
        self.logged = 0
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log: deque[dict[str, Any]] = deque(maxlen=KEPT_LOGS)

    def tell(self, told: dict[str, Any]) -> None:
        """`told`: the params of a progress notification, as a sandbox sends them. What is none is passed over."""
        kept: dict[str, Any] = {
            name: value
            for name in ("progress", "total")
            if isinstance(value := told.get(name), int | float) and not isinstance(value, bool) and abs(value) < 1e300
        }
        if "progress" not in kept:
            return
        if isinstance(message := told.get("message"), str):
            kept["message"] = message[:_MAX_MESSAGE]
        self.progress = kept
        self.ring()

    def log(self, told: dict[str, Any]) -> None:
        """`told`: the params of a log message, as a sandbox sends them. What is none is passed over."""
        level, data = told.get("level"), told.get("data")
        if level not in LOG_LEVELS or data is None:
            return
        if not isinstance(data, str) and len(written := json.dumps(data, ensure_ascii=False)) > _MAX_MESSAGE:
            data = written
        kept = {"level": level, "data": data[:_MAX_MESSAGE] if isinstance(data, str) else data}
        if isinstance(logger := told.get("logger"), str):
            kept["logger"] = logger[:_MAX_LOGGER]
        self._log.append(kept)
        self.logged += 1
        self.ring()

    def log_after(self, heard: int) -> list[dict[str, Any]]:
        """What was logged behind the first `heard` messages and is still kept."""
        return list(self._log)[max(0, heard - self.logged + len(self._log)) :]

    def ring(self) -> None:
        self.changed.set_result(None)
        self.changed = asyncio.get_running_loop().create_future()
