"""A run's journal made by hand: two tasks, the second fails, is criticised, changed and done again."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

from agent.events import Event, EventKind
from agent.planning.task import TaskNode
from agent.tools.outcome import Outcome, OutcomeKind


def png(width: int = 4, height: int = 3, shade: int = 128) -> bytes:
    """A small grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([shade] * width) for _ in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


class Script:
    """Events with running numbers and times; each `add` is 1.5 s after the one before."""

    def __init__(self, run_id: str = "r-1") -> None:
        self.run_id = run_id
        self.events: list[Event] = []

    def add(self, kind: EventKind, **data: Any) -> Event:
        seq = len(self.events) + 1
        at = 1_780_000_000.0 + 1.5 * seq
        event = Event(self.run_id, seq, at, kind, data, f"{seq - 1:064x}", f"{seq:064x}")
        self.events.append(event)
        return event

    def start(self, goal: str) -> None:
        settings = {"budget": {"max_tokens": 50_000, "max_usd": None}, "llm": {"model": "test"}}
        bound = {"llm_calls": 300, "tool_calls": 600}
        files = [{"path": "data.csv", "bytes": 12, "sha256": "0" * 64}]
        self.add(EventKind.RUN_STARTED, goal=goal, files=files, settings=settings, bound=bound, version="0.1.0")
        self.add(EventKind.SESSION_OPENED, session_id="s1", reason="first", restored_files=0)

    def model(self, key: str, role: str, text: str, *calls: dict[str, str]) -> None:
        self.add(
            EventKind.LLM_REQUESTED,
            key=key,
            role=role,
            model="test",
            reserved={"tokens": 900, "usd": 0.01},
            prompt_sha256="",
        )
        reply = {"text": text, "tool_calls": list(calls), "finish_reason": "tool_calls" if calls else "stop"}
        usage = {
            "prompt_tokens": 500,
            "completion_tokens": 40,
            "cached_tokens": 100,
            "reasoning_tokens": 0,
            "estimated": False,
        }
        self.add(EventKind.LLM_REPLIED, key=key, role=role, model="test", reply=reply, usage=usage, usd=0.002, ms=700.0)

    def tool(self, key: str, outcome: Outcome, arguments: dict[str, Any]) -> None:
        intent = {"tool": outcome.tool, "arguments": arguments, "task_id": key.partition("/")[0], "effect": "once"}
        self.add(EventKind.TOOL_INTENDED, key=key, call_id=outcome.call_id, **intent)
        self.add(EventKind.TOOL_SETTLED, key=key, call_id=outcome.call_id, outcome=outcome.as_json(), ms=210.0)

    def change(self, task_id: str, before: str, after: str, attempt: int, reason: str = "") -> None:
        data = {"task_id": task_id, "from": before, "to": after, "role": "loop", "reason": reason, "attempt": attempt}
        self.add(EventKind.TASK_CHANGED, **data)

    def attempt(self, task_id: str, attempt: int, code: str, outcome: Outcome, verdict: str, criticism: str) -> None:
        """One step that runs `code`, one that submits, then critic and reflector."""
        place = f"{task_id}/a{attempt}"
        self.change(task_id, "pending", "executing", attempt)
        arguments = {"code": code}
        self.model(
            f"{place}/actor/s1", "actor", "I run it.", {"id": "c", "name": outcome.tool, "arguments": _json(arguments)}
        )
        self.tool(f"{place}/actor/s1/c0", outcome, arguments)
        submit = {"id": "d", "name": "subtask_submit", "arguments": '{"success": true, "result": "made it"}'}
        self.model(f"{place}/actor/s2", "actor", "", submit)
        self.add(
            EventKind.TASK_SUBMITTED, task_id=task_id, attempt=attempt, result="made it", success=True, outputs={"rows": 12},
            key=f"{place}/actor/s2",
        )  # fmt: skip
        self.model(f"{place}/critic/r0", "critic", _json({"verdict": verdict, "criticism": criticism}))
        self.add(
            EventKind.TASK_JUDGED,
            task_id=task_id,
            attempt=attempt,
            verdict=verdict,
            criticism=criticism,
            key=f"{place}/critic/r0",
        )
        self.change(task_id, "executing", "success" if verdict == "pass" else "failed", attempt, criticism)
        self.add(
            EventKind.TASK_REFLECTED, task_id=task_id, attempt=attempt, summary="what was done", plan_lessons=["look twice"],
            tool_lessons=["print totals"], key=f"{place}/reflector/r0",
        )  # fmt: skip


def outcome(kind: OutcomeKind = OutcomeKind.DONE, text: str = "42", *, code: str = "ok", **more: Any) -> Outcome:
    content = more.pop("content", [{"type": "text", "text": text}])
    return Outcome(kind, "python_execute", "call-1", code, text, executed="yes", content=content, **more)


def full_run(goal: str = "Look at the data", answer: str = "It is **fine**.") -> list[Event]:
    script = Script()
    script.start(goal)
    nodes = [
        TaskNode("t1", "Load the data", ("every row is read",)),
        TaskNode("t2", "Draw a chart", ("chart.png exists",), ("t1",), artifacts=("chart.png",)),
    ]
    script.model("plan/generator/r0", "plan_generator", _json({"tasks": []}))
    script.add(EventKind.PLAN_GENERATED, tasks=[node.definition() for node in nodes], reason="two steps")
    script.attempt(
        "t1", 1, "rows = load()\nlen(rows)", outcome(workspace_changed=["clean.csv"]), "pass", "all rows are there"
    )
    failed = outcome(OutcomeKind.FAILED, "Traceback:\nValueError: no column 'rain'", code="tool_failed")
    script.attempt(
        "t2", 1, "draw(rows['rain'])", failed, "fail", "There is no chart: the column is called precipitation."
    )
    edit = {"op": "modify", "task_id": "t2", "changes": {"goal": "Draw a chart of precipitation"}}
    script.model("t2/a1/refiner/s1/r0", "plan_refiner", _json({"operations": [edit]}))
    script.add(EventKind.PLAN_EDITED, operations=[edit], reason="name the column", after_task="t2", attempt=1, step=1)
    script.change("t2", "revised", "pending", 1)
    picture = {"type": "image", "data": base64.b64encode(png()).decode(), "mimeType": "image/png"}
    drawn = outcome(content=[{"type": "text", "text": "saved"}, picture], workspace_changed=["chart.png"])
    script.attempt("t2", 2, "draw(rows['precipitation'])", drawn, "pass", "the chart is there")
    script.model("answer/summariser/r0", "summariser", answer)
    script.add(EventKind.RUN_ENDED, state="done", reason="", answer=answer, exit_code=0)
    return script.events


def _json(value: object) -> str:
    return json.dumps(value)
