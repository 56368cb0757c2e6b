"""Tool calls under way: from the request to the one answer that each of them gets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator

from sandbox_images.base import cgroup
from sandbox_images.base.annotations import Any
from sandbox_images.base.call_memory import CallMemory, CallRecord, encode_result
from sandbox_images.base.event_loop import Loop, Timer
from sandbox_images.base.mcp_stdio import Encoded, ProtocolError
from sandbox_images.workspace import workspace_scan
from sandbox_images.workspace.artifacts import Artifacts
from sandbox_images.workspace.output import Output
from sandbox_images.workspace.quota import Quota

DEFAULT_DEADLINE_S, MAX_DEADLINE_S = 300.0, 86_400.0
DEFAULT_TEXT_BYTES, MIN_TEXT_BYTES = 65_536, 1024
# what a refusal of the file system means as the end of a tool call
REFUSAL_ENDS = {"not_found": "failed", "exists": "failed", "too_large": "disk_full", "disk_full": "disk_full"}


class Ending:
    """How a call came out. `message` is needed for every end but `done`; `content` follows the text of the streams."""

    __slots__ = (
        "content",
        "end",
        "errors",
        "exit_code",
        "limits_hit",
        "message",
        "notes",
        "signal",
        "state",
        "structured",
        "truncated",
        "usage",
    )

    def __init__(
        self,
        end: str = "done",
        message: str | None = None,
        *,
        structured: dict[str, Any] | None = None,
        content: list[dict[str, Any]] | None = None,
        errors: list[dict[str, str]] | None = None,
        state: str | None = None,
        exit_code: int | None = None,
        signal: str | None = None,
        notes: list[str] | None = None,
        usage: dict[str, Any] | None = None,
        limits_hit: tuple[str, ...] = (),
    ) -> None:
        self.end, self.message, self.state = end, message, state
        self.structured, self.content = structured, content or []
        self.errors, self.exit_code, self.signal = errors, exit_code, signal
        self.notes, self.usage, self.limits_hit = notes or [], usage or {}, {*limits_hit}
        self.truncated: dict[str, Any] | None = None


class ToolFailure(Exception):  # noqa: N818 - a value on its way to the caller
    """Ends a call with `failed`, or with another end that is given."""

    def __init__(
        self, message: str, end: str = "failed", pointer: str | None = None, limits_hit: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        errors = None if pointer is None else [{"pointer": pointer, "message": message}]
        self.ending = Ending(end, message, errors=errors, limits_hit=limits_hit)


def refusal(problem: ProtocolError, pointer: str = "/path") -> Ending:
    """The end of a call whose path or data was refused."""
    end = REFUSAL_ENDS.get(problem.kind or "", "invalid")
    errors = [{"pointer": pointer, "message": problem.message}] if end == "invalid" else None
    return Ending(end, problem.message, errors=errors)


class Call:
    """One tools/call. Whoever runs it sets `stop`, which is asked to end it early and then calls `Calls.finish`."""

    __slots__ = ("arguments", "artifacts", "before", "call_id", "counters", "deadline_s", "displays", "ended", "max_text", "muted",
                 "output", "record", "request_id", "started", "stop", "timer", "tool", "writes")  # fmt: skip

    def __init__(
        self,
        request_id: Any,
        tool: str,
        arguments: dict[str, Any],
        record: CallRecord,
        meta: dict[str, Any],
        *,
        writes: bool,
    ) -> None:
        self.request_id, self.tool, self.arguments, self.writes = request_id, tool, arguments, writes
        self.record, self.call_id = record, record.call_id
        deadline, text = meta.get("deadline_s"), meta.get("max_text_bytes")
        good = isinstance(deadline, (int, float)) and not isinstance(deadline, bool) and 0 < deadline <= MAX_DEADLINE_S
        self.deadline_s: float = deadline if good and deadline is not None else DEFAULT_DEADLINE_S
        self.max_text = max(MIN_TEXT_BYTES, text) if isinstance(text, int) else DEFAULT_TEXT_BYTES
        self.started = time.monotonic()
        self.before = workspace_scan.Snapshot()
        self.counters: cgroup.Counters | None = None  # of calls that run code
        self.output: Output | None = None
        self.displays: list[dict[str, Any]] = []  # content blocks shown while it ran
        self.artifacts: list[dict[str, Any]] = []
        self.timer: Timer | None = None
        self.stop: Callable[[str], None] | None = None
        self.ended, self.muted = False, False


Handler = Callable[[Call], Generator[None, None, Ending] | None]


class Calls:
    """All calls under way. A handler is a generator that returns the Ending, or starts something that calls `finish` later."""

    def __init__(
        self,
        loop: Loop,
        quota: Quota,
        artifacts: Artifacts,
        memory: CallMemory,
        answer: Callable[[Any, Encoded], None],
    ) -> None:
        self.loop, self.quota, self.artifacts, self.memory, self._answer = loop, quota, artifacts, memory, answer
        self._by_call: dict[str, Call] = {}
        self._by_request: dict[Any, Call] = {}

    def is_open(self, request_id: Any) -> bool:
        return request_id in self._by_request

    def admit(self, meta: dict[str, Any]) -> CallRecord:
        """The record of a call that may run; one without a call_id gets one. Raises ProtocolError."""
        call_id = meta.get("call_id")
        named = isinstance(call_id, str) and call_id
        return self.memory.admit(str(call_id) if named else os.urandom(8).hex(), meta.get("epoch"))

    def begin(self, call: Call, handler: Handler) -> None:
        self._by_request[call.request_id] = call
        self._by_call[call.call_id] = call
        call.timer = self.loop.call_later(call.deadline_s, lambda: self._stop(call, "deadline"))
        self.loop.start(self._run(call, handler))

    def _run(self, call: Call, handler: Handler) -> Generator[None, None, None]:
        if call.writes and self.quota.stale:
            yield from self.quota.refresh()
        if call.ended:
            return
        call.before = self.quota.snapshot
        try:
            work = handler(call)
            if work is not None:
                yield from self._follow(call, work)
        except ToolFailure as failure:
            self.finish(call, failure.ending)
        except ProtocolError as problem:
            self.finish(call, refusal(problem))
        except OSError as problem:
            self.finish(call, Ending("failed", f"The operating system refused: {problem.strerror}."))

    def _follow(self, call: Call, work: Generator[None, None, Ending]) -> Generator[None, None, None]:
        """Run a generator handler to its end, unless the call is stopped before."""
        stopped: list[str] = []
        if call.stop is None:
            call.stop = stopped.append
        while True:
            try:
                next(work)
            except StopIteration as end:
                self.finish(call, end.value)
                return
            if stopped:
                work.close()
                self.finish(call, Ending(stopped[0], STOPPED[stopped[0]]))
                return
            yield

    def new_output(self, call: Call) -> Output:
        """For a call that runs code, just before it does."""
        call.counters = cgroup.Counters()
        call.output = Output(call.max_text, self.artifacts.spool(call.call_id), call.record)
        return call.output

    def finish(self, call: Call, ending: Ending) -> None:
        """Give the answer, once what changed in the workspace is known. The second ending of a call is ignored."""
        if call.ended:
            return
        call.ended = True
        if call.timer is not None:
            call.timer.cancel()
        if call.output is not None:
            call.output.close()
        self.loop.start(self._finish(call, ending))

    def _finish(self, call: Call, ending: Ending) -> Generator[None, None, None]:
        changed: tuple[list[str], bool] = ([], False)
        if call.writes:
            yield from self.quota.refresh()
            changed = workspace_scan.changes(call.before, self.quota.snapshot)
            if ending.end in ("done", "failed") and self.quota.exceeded(call.before):
                ending.end, ending.message = "disk_full", self.quota.message()
        _tell_limits(call, ending)
        result = encode_result(self._result(call, ending, changed))
        del self._by_request[call.request_id]
        del self._by_call[call.call_id]
        self.memory.ended(call.record, result, ran=ending.end != "invalid")
        if not call.muted:
            self._answer(call.request_id, result)

    def _result(self, call: Call, ending: Ending, changed: tuple[list[str], bool]) -> dict[str, Any]:
        truncated = ending.truncated
        content: list[dict[str, Any]] = []
        structured = ending.structured
        if call.output is not None:
            content, streams, truncated = output_blocks(call.output)
            if call.tool == "python_execute":
                streams["result"] = call.output.texts()[0]["result"] or None
            structured = {**streams, **(structured or {})}
            if call.output.spool.path and truncated:
                call.artifacts.append(
                    {"path": call.output.spool.path, "bytes": call.output.spool.bytes, "media_type": "text/plain"}
                )
                if call.output.spool.incomplete:
                    ending.notes.append(
                        f"The output was too long to keep: {call.output.spool.path} holds only its first part."
                    )
        content += call.displays + ending.content
        content += [{"type": "text", "text": f"[note] {note}"} for note in ending.notes]
        if not content and ending.message:
            content = [{"type": "text", "text": ending.message}]
        usage = {
            "wall_ms": round((time.monotonic() - call.started) * 1000, 3),
            "cpu_ms": None,
            "memory_peak_bytes": None,
        }
        outcome = {
            "end": ending.end, "message": ending.message, "errors": ending.errors, "state": ending.state,
            "exit_code": ending.exit_code, "signal": ending.signal, "limits_hit": sorted(ending.limits_hit), "truncated": truncated, "artifacts": call.artifacts,
            "usage": usage | ending.usage, "workspace_changed": changed[0], "workspace_changed_more": changed[1],
        }  # fmt: skip
        result: dict[str, Any] = {"content": content, "isError": ending.end != "done"}
        if structured is not None:
            result["structuredContent"] = structured
        result["_meta"] = {"toolcrib/outcome": outcome}
        return result

    def cancel(self, call_id: str) -> bool:
        call = self._by_call.get(call_id)
        if call is None or call.ended:
            return False
        self._stop(call, "cancelled")
        return True

    def cancel_request(self, request_id: Any) -> None:
        """MCP's own way: the request is cancelled and gets no answer."""
        call = self._by_request.get(request_id) if isinstance(request_id, (str, int)) else None
        if call is not None and not call.ended:
            call.muted = True
            self._stop(call, "cancelled")

    def peek(self, call_id: str) -> list[dict[str, Any]] | None:
        """The content so far; None for a call that is not under way."""
        call = self._by_call.get(call_id)
        if call is None:
            return None
        blocks = output_blocks(call.output)[0] if call.output is not None else []
        return blocks + call.displays

    def _stop(self, call: Call, end: str) -> None:
        if call.ended:
            return
        if call.stop is not None:
            call.stop(end)
        else:
            self.finish(call, Ending(end, STOPPED[end]))


def _tell_limits(call: Call, ending: Ending) -> None:
    """Which limits of the sandbox the call met: from counters and refusals of the kernel, never from an exit code."""
    if ending.end == "disk_full" and "file_size" not in ending.limits_hit:
        ending.limits_hit.add("disk")
    if call.counters is None:
        return
    if call.counters.out_of_memory():
        ending.limits_hit.add("memory")
        if ending.end != "oom":
            ending.notes.append("The sandbox ran out of memory meanwhile: the system killed one of its processes.")
    if call.counters.out_of_processes():
        ending.limits_hit.add("pids")
    if "pids" in ending.limits_hit:
        most = cgroup.max_processes()
        limit = "limit of processes and threads" if most is None else f"limit of {most} processes and threads"
        told = f"The session's {limit} was reached: one could not be started."
        if ending.end in ("failed", "crashed"):
            ending.message = f"{ending.message} {told}"
        else:
            ending.notes.append(told)


STOPPED = {
    "deadline": "The call outlived its deadline and was stopped.",
    "cancelled": "The call was cancelled.",
    "disk_full": "The workspace has outgrown its disk quota and the call was stopped. Delete files, then try again.",
}


def output_blocks(output: Output) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]:
    """(text blocks, stdout and stderr for the structured content, `truncated`). A stream that said nothing has no block."""
    texts, exact, kept = output.texts()
    blocks = []
    if texts["stdout"]:
        blocks.append({"type": "text", "text": texts["stdout"]})
    if texts["stderr"]:
        blocks.append({"type": "text", "text": f"[stderr]\n{texts['stderr']}"})
    if texts["result"]:
        blocks.append({"type": "text", "text": texts["result"]})
    streams: dict[str, Any] = {"stdout": texts["stdout"], "stderr": texts["stderr"]}
    if not exact:
        streams["escaped"] = True  # bytes that are no UTF-8 are shown as \xNN
    return blocks, streams, output.truncated(kept)
