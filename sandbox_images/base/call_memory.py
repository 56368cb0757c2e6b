"""What a worker remembers of its calls, for a server that was not there when they ended: `toolcrib/attach`, `recall`
and `output` of docs/reference/sandbox-protocol.md, and the refusal to run a call twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sandbox_images.base.annotations import Any
from sandbox_images.base.lease import CallLater, Lease
from sandbox_images.base.live_output import LiveOutput
from sandbox_images.base.mcp_stdio import INVALID_PARAMS, Encoded, ProtocolError, encode_value, refused

KEPT_CALLS = 256
KEPT_RESULT_BYTES = 16 << 20
KEPT_OUTPUT_BYTES = 8 << 20  # of calls that have ended
MAX_WAIT_S = 3600.0
DEFAULT_READ_BYTES, MAX_READ_BYTES = 1 << 16, 1 << 20

Reply = Callable[[dict[str, Any] | Encoded | ProtocolError], None]


class CallRecord:
    """One call: its result once it has ended, and the last of what it wrote."""

    __slots__ = ("call_id", "output", "result", "waiters")

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.output: LiveOutput | None = None
        self.result: Encoded | None = None
        self.waiters: list[Callable[[], None]] = []

    def feed(self, stream: int, data: bytes) -> None:
        """Bytes of stdout (0) or stderr (1)."""
        if self.output is None:
            self.output = LiveOutput()
        if self.output.feed(stream, data) and self.waiters:
            self.wake()

    def wake(self) -> None:
        for waiter in self.waiters[:]:
            waiter()


class CallMemory:
    """The methods take (params, reply) and reply once, some of them later."""

    def __init__(self, call_later: CallLater, lease: Lease) -> None:
        self._call_later, self._lease = call_later, lease
        self._epoch, self._bound = 0, False
        self._records: dict[str, CallRecord] = {}
        self._ended: deque[CallRecord] = deque()  # the oldest first
        self._seen: set[int] = set()  # hashes of all call ids ever: 64 bits of a keyed hash, a few dozen bytes each
        self._result_bytes = self._output_bytes = 0

    # ---- who may speak

    def bind(self, params: dict[str, Any]) -> None:
        """The epoch and the lease of `toolcrib/bind`. Raises ProtocolError."""
        self._take_epoch(params.get("epoch", 0))
        self._lease.renew(params.get("lease_s"))
        self._bound = True

    def attach(self, params: dict[str, Any], reply: Reply) -> None:
        self._take_epoch(params.get("epoch"))
        self._lease.renew(params.get("lease_s"))
        calls = [
            {"call_id": record.call_id, "state": "running" if record.result is None else "ended"}
            for record in self._records.values()
        ]
        reply({"epoch": self._epoch, "bound": self._bound, "calls": calls})

    def _take_epoch(self, epoch: Any) -> None:
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ProtocolError(INVALID_PARAMS, "epoch must be an integer from 0 on")
        if epoch < self._epoch:
            raise refused("stale_epoch", f"A server of epoch {self._epoch} has attached: epoch {epoch} is over.")
        self._epoch = epoch

    # ---- calls

    def admit(self, call_id: str, epoch: Any) -> CallRecord:
        """The record of a call that may run now. A call that tells no epoch has epoch 0. Raises ProtocolError."""
        if (epoch if isinstance(epoch, int) else 0) < self._epoch:
            raise refused("stale_epoch", f"A server of epoch {self._epoch} has attached: nothing of this call was run.")
        mark = hash(call_id)
        if mark in self._seen:
            raise refused("call_exists", "A call with this call_id was received before: it is not run again.")
        self._seen.add(mark)
        record = self._records[call_id] = CallRecord(call_id)
        return record

    def ended(self, record: CallRecord, result: Encoded, *, ran: bool) -> None:
        """Remember how a call ended, and tell those who wait for that. One that was not `ran` may come again with its id."""
        record.result = result
        if record.output is not None:
            record.output.flush()
            self._output_bytes += record.output.kept_bytes
        self._result_bytes += len(result)
        self._ended.append(record)
        if not ran:
            self._seen.discard(hash(record.call_id))
        record.wake()
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        if self._output_bytes > KEPT_OUTPUT_BYTES:
            for record in self._ended:
                self._forget_output(record)
                if self._output_bytes <= KEPT_OUTPUT_BYTES:
                    break
        while len(self._ended) > KEPT_CALLS or self._result_bytes > KEPT_RESULT_BYTES:
            record = self._ended.popleft()
            self._forget_output(record)
            self._result_bytes -= len(record.result or b"")
            if self._records.get(record.call_id) is record:
                del self._records[record.call_id]

    def _forget_output(self, record: CallRecord) -> None:
        if record.output is not None:
            self._output_bytes -= record.output.kept_bytes
            record.output.forget()

    # ---- questions

    def recall(self, params: dict[str, Any], reply: Reply) -> None:
        call_id = _call_id(params)
        record = self._records.get(call_id)
        if record is None:
            reply({"state": "unknown", "seen": hash(call_id) in self._seen})
            return

        def look(*, last: bool) -> bool:
            if record.result is not None:
                reply(Encoded(b'{"state":"ended","result":' + record.result + b"}"))
            elif last:
                reply({"state": "running"})
            return last or record.result is not None

        self._poll(record, look, _number(params, "wait_s", 0, MAX_WAIT_S))

    def output(self, params: dict[str, Any], reply: Reply) -> None:
        offset = int(_number(params, "offset", 0, float(1 << 62)))
        max_bytes = max(1, int(_number(params, "max_bytes", DEFAULT_READ_BYTES, MAX_READ_BYTES)))
        record = self._records.get(_call_id(params))
        if record is None:
            raise refused("not_found", "No such call is running or remembered.")

        def look(*, last: bool) -> bool:
            output, ended = record.output, record.result is not None
            chunks, following, lost = output.read(offset, max_bytes) if output is not None else ([], offset, 0)
            if not chunks and not ended and not last:
                return False
            ended = ended and (output is None or following >= output.end)
            reply({"chunks": chunks, "next": following, "lost": lost, "ended": ended})
            return True

        self._poll(record, look, _number(params, "wait_s", 0, MAX_WAIT_S))

    def _poll(self, record: CallRecord, look: Callable[..., bool], wait_s: float) -> None:
        """Ask `look` now, at each sign of life of the call, and for the `last` time after `wait_s`; it says when it is done."""
        if look(last=wait_s <= 0):
            return

        def wake() -> None:
            if look(last=False):
                timer.cancel()
                record.waiters.remove(wake)

        def late() -> None:
            record.waiters.remove(wake)
            look(last=True)

        timer = self._call_later(wait_s, late)
        record.waiters.append(wake)


def encode_result(value: dict[str, Any]) -> Encoded:
    """A tools/call result as JSON; without its structured content when that is a value that JSON can't say."""
    try:
        return encode_value(value)
    except (ValueError, RecursionError):
        value.pop("structuredContent", None)
        return encode_value(value)


def _call_id(params: dict[str, Any]) -> str:
    call_id = params.get("call_id")
    if not isinstance(call_id, str):
        raise ProtocolError(INVALID_PARAMS, "call_id must be a text")
    return call_id


def _number(params: dict[str, Any], name: str, default: float, most: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
        raise ProtocolError(INVALID_PARAMS, f"{name} must be a number from 0 on")
    return min(value, most)
