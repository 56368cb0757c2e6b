"""What a run is, as a fold over its journal: the same code for a live run, a resumed one, `show` and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from agent.budget import Bound, Cost, Ledger
from agent.events import Event, EventKind
from agent.planning.edits import apply_operations
from agent.planning.plan import Plan
from agent.planning.task import TaskState
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import StepKey, attempt_of
from agent.trajectory.step import CallRecord, Judgement, Refinement, Reflection, Step, Submission


@dataclass
class RunState:
    """All that is known of a run. Read it, but change it only through `apply`. Times are seconds since 1970.

    `state` is new, running, done, failed, stopped or interrupted. `attempts` are by (task id, attempt from 1). `calls` are
    all tool calls by key, those of `attempts` included. `current` names the key of the request or call under way.
    """

    run_id: str = ""
    goal: str = ""
    files: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    bound: Bound = field(default_factory=lambda: Bound(0, 0))
    version: str = ""
    state: str = "new"
    reason: str = ""
    answer: str = ""
    exit_code: int | None = None
    started_at: float = 0.0
    last_at: float = 0.0
    ended_at: float | None = None
    resumes: int = 0
    seq: int = 0
    plan: Plan = field(default_factory=Plan)
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    notes: list[str] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    breakers: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # changes of task states: TASK_CHANGED's data with `at`
    current: str | None = None

    @property
    def cost(self) -> Cost:
        return self.ledger.total

    @property
    def seconds(self) -> float:
        return self.ledger.seconds

    def cost_of(self, task_id: str) -> Cost:
        """Of one task in all its attempts, its children left out."""
        total = Cost()
        for key, cost in self.ledger.by_key.items():
            place = attempt_of(key)
            if place is not None and place[0] == task_id:
                total += cost
        return total

    def attempts_of(self, task_id: str) -> list[Attempt]:
        return [a for (owner, _), a in sorted(self.attempts.items(), key=lambda item: item[0][1]) if owner == task_id]

    def attempt(self, task_id: str, number: int) -> Attempt:
        """An empty one when nothing is known of it."""
        return self.attempts.get((task_id, number)) or Attempt(task_id, number)

    def _filled(self, task_id: str, number: int) -> Attempt:
        return self.attempts.setdefault((task_id, number), Attempt(task_id, number))

    def apply(self, event: Event) -> None:
        """Take in the next event. Unknown fields are ignored, so that a newer journal can be read."""
        self.run_id, self.seq, self.last_at = event.run_id, event.seq, event.at
        self.ledger.apply(event)
        match event.kind:
            case EventKind.RUN_STARTED | EventKind.RUN_RESUMED | EventKind.RUN_ENDED:
                self._apply_run(event)
            case EventKind.LLM_REQUESTED | EventKind.LLM_REPLIED | EventKind.LLM_FAILED:
                self._apply_llm(event)
            case EventKind.TOOL_INTENDED | EventKind.TOOL_SETTLED:
                self._apply_tool(event)
            case EventKind.PLAN_GENERATED | EventKind.PLAN_EDITED:
                self._apply_plan(event)
            case EventKind.TASK_CHANGED:
                self._apply_change(event)
            case EventKind.TASK_SUBMITTED | EventKind.TASK_JUDGED | EventKind.TASK_REFLECTED:
                self._apply_ending(event)
            case EventKind.SESSION_OPENED:
                self.sessions.append({**event.data, "at": event.at})
            case EventKind.BREAKER_CHANGED:
                self.breakers[event.data["name"]] = event.data["state"]
            case EventKind.NOTE:
                self.notes.append(event.data["text"])

    def _apply_run(self, event: Event) -> None:
        data = event.data
        if event.kind is EventKind.RUN_ENDED:
            self.state, self.reason, self.answer = data["state"], data["reason"], data["answer"]
            self.exit_code, self.ended_at, self.current = data["exit_code"], event.at, None
            return
        self.state, self.reason, self.exit_code, self.ended_at = "running", "", None, None
        if event.kind is EventKind.RUN_RESUMED:
            self.resumes += 1
            if "budget" in data:  # the allowances of this resumption hold for the next ones too
                self.settings = {**self.settings, "budget": data["budget"]}
            return
        self.started_at = event.at
        self.goal, self.files = data["goal"], list(data.get("files") or [])
        self.settings, self.version = dict(data.get("settings") or {}), str(data.get("version", ""))
        self.bound = Bound(**data["bound"])

    def _apply_llm(self, event: Event) -> None:
        data = event.data
        self.current = data["key"] if event.kind is EventKind.LLM_REQUESTED else None
        place = StepKey.parse(data["key"])
        if place is None or event.kind is EventKind.LLM_REQUESTED:
            return
        reply, usage = data.get("reply") or {}, data.get("usage") or {}
        calls = tuple(
            CallRecord(place.of_call(i), str(c["name"]), str(c["arguments"]))
            for i, c in enumerate(reply.get("tool_calls") or [])
        )
        self._filled(place.task_id, place.attempt).steps[data["key"]] = Step(
            key=data["key"],
            task_id=place.task_id,
            attempt=place.attempt,
            n=place.step,
            again=place.again,
            thought=str(reply.get("text") or ""),
            calls=calls,
            finish_reason=str(reply.get("finish_reason", "")),
            model=str(data.get("model", "")),
            tokens=int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0)),
            usd=float(data.get("usd") or 0.0),
            ms=float(data.get("ms") or 0.0),
            at=event.at,
            problem=str(data.get("message", "")) if event.kind is EventKind.LLM_FAILED else "",
        )

    def _apply_tool(self, event: Event) -> None:
        data = event.data
        self.current = data["key"] if event.kind is EventKind.TOOL_INTENDED else None
        place = StepKey.parse(data["key"])
        if place is None or place.call is None:
            return
        steps = self._filled(place.task_id, place.attempt).steps
        step = steps.get(place.request)
        if step is None or place.call >= len(step.calls):
            return
        changes: dict[str, Any] = {"call_id": str(data.get("call_id", ""))}
        if event.kind is EventKind.TOOL_INTENDED:
            changes["effect"] = str(data.get("effect", "once"))
        else:
            changes |= {"outcome": data["outcome"], "ms": float(data.get("ms") or 0.0)}
        calls = list(step.calls)
        calls[place.call] = replace(calls[place.call], **changes)
        steps[place.request] = replace(step, calls=tuple(calls))

    def _apply_plan(self, event: Event) -> None:
        data = event.data
        if event.kind is EventKind.PLAN_GENERATED:
            self.plan = Plan.from_definitions(data["tasks"])
            return
        operations = tuple(data["operations"])
        self.plan = apply_operations(self.plan, operations)
        place = data.get("after_task"), data.get("attempt")
        if place[0] is not None and place[1] is not None:
            refinement = Refinement(
                int(data["step"]), operations, str(data.get("reason", "")), str(data.get("rejected", ""))
            )
            self._filled(place[0], place[1]).refinements.append(refinement)

    def _apply_change(self, event: Event) -> None:
        data, after = event.data, TaskState(event.data["to"])
        self.history.append({**data, "at": event.at})
        self.plan = self.plan.move(data["task_id"], after, str(data.get("reason", "")))
        number = int(data["attempt"])
        if after is TaskState.EXECUTING and number:
            self.plan = self.plan.update(data["task_id"], attempt=number)
            self._filled(data["task_id"], number).started_at = event.at
        elif after in {TaskState.SUCCESS, TaskState.FAILED}:
            if number:
                self._filled(data["task_id"], number).ended_at = event.at
            self.plan = self.plan.update(data["task_id"], cost=self.cost_of(data["task_id"]))

    def _apply_ending(self, event: Event) -> None:
        data = event.data
        attempt = self._filled(data["task_id"], data["attempt"])
        if event.kind is EventKind.TASK_SUBMITTED:
            attempt.submission = Submission(
                success=bool(data["success"]),
                result=str(data["result"]),
                outputs=dict(data.get("outputs") or {}),
                reason=str(data.get("reason", "")),
                plan_change=str(data.get("plan_change", "")),
                key=str(data.get("key", "")),
            )
            changes: dict[str, Any] = {"result": attempt.submission.result, "output_values": attempt.submission.outputs}
        elif event.kind is EventKind.TASK_JUDGED:
            attempt.judgement = Judgement(
                data["verdict"] == "pass", str(data["criticism"]), str(data.get("by", "critic"))
            )
            changes = {"criticism": attempt.judgement.criticism}
        else:
            attempt.reflection = Reflection(
                str(data["summary"]), tuple(data.get("plan_lessons") or ()), tuple(data.get("tool_lessons") or ())
            )
            changes = {"reflection": attempt.reflection.summary}
        self.plan = self.plan.update(data["task_id"], **changes)


def fold(events: Iterable[Event]) -> RunState:
    """The state after `events`, which are one run's, from its first, in order."""
    state = RunState()
    for event in events:
        state.apply(event)
    return state
