"""What the scripted tool server remembers of its calls: epochs, results and output, as a real worker does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from toolserver.runtime.fake_workspace import Refused

_LOOK_EVERY_S = 0.005


@dataclass
class FakeRecord:
    """`output` is the call's own list of texts, which goes on growing while it runs."""

    output: list[str]
    result: dict[str, Any] | None = None

    @property
    def ran(self) -> bool:
        """False for a call whose arguments were refused: it may come again with the same id."""
        meta = (self.result or {}).get("_meta", {}).get("toolcrib/outcome", {})
        return bool(meta.get("end") != "invalid")


class FakeCalls:
    """Forgets nothing."""

    def __init__(self) -> None:
        self._records: dict[str, FakeRecord] = {}
        self._epoch = 0

    def take_epoch(self, epoch: int) -> None:
        """Of `bind` and `attach`. Raises Refused."""
        if epoch < self._epoch:
            raise Refused("stale_epoch", f"a server of epoch {self._epoch} has attached")
        self._epoch = epoch

    def admit(self, call_id: str, output: list[str], epoch: int) -> FakeRecord:
        """Raises Refused: the call's epoch is over, or its id was received before."""
        if epoch < self._epoch:
            raise Refused("stale_epoch", f"a server of epoch {self._epoch} has attached")
        earlier = self._records.get(call_id)
        if earlier is not None and earlier.ran:
            raise Refused("call_exists", "a call with this call_id was received before")
        record = self._records[call_id] = FakeRecord(output)
        return record

    def states(self) -> list[dict[str, str]]:
        return [
            {"call_id": call_id, "state": "running" if record.result is None else "ended"}
            for call_id, record in self._records.items()
        ]

    async def recall(self, call_id: str, wait_s: float) -> dict[str, Any]:
        record = self._records.get(call_id)
        if record is None:
            return {"state": "unknown", "seen": False}
        until = asyncio.get_running_loop().time() + wait_s
        while record.result is None:
            if asyncio.get_running_loop().time() >= until:
                return {"state": "running"}
            await asyncio.sleep(_LOOK_EVERY_S)
        return {"state": "ended", "result": record.result}

    async def output(self, call_id: str, offset: int = 0, wait_s: float = 0, max_bytes: int = 65_536) -> dict[str, Any]:
        """All of it is stdout, and all of it is kept. Raises Refused."""
        record = self._records.get(call_id)
        if record is None:
            raise Refused("not_found", "no such call is running or remembered")
        until = asyncio.get_running_loop().time() + wait_s
        while True:
            ended = record.result is not None
            whole = "".join(record.output).encode()
            data = whole[offset:][:max_bytes]
            if data or ended or asyncio.get_running_loop().time() >= until:
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        following = offset + len(data)
        chunks = [{"stream": "stdout", "text": data.decode("utf-8", "replace"), "end": following}] if data else []
        return {"chunks": chunks, "next": following, "lost": 0, "ended": ended and following >= len(whole)}
