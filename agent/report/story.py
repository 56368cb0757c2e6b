"""What happened in a run, as a reader wants it: the run's state with all attempts, other roles' work, costs, a timeline.

A pure fold over the journal, on top of agent.store.fold. A journal that ends early gives a story without an end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from agent.budget import Cost
from agent.events import Event, EventKind
from agent.planning.task import TaskState
from agent.report.plain_text import one_line
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.keys import attempt_of
from agent.trajectory.step import CallRecord

TOOLS = "tools"  # the row of the cost table that stands for tool calls
_ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception|Warning|Interrupt|Exit)\b(?::|$)")
_BAD = {TaskState.FAILED, TaskState.BLOCKED, TaskState.CANCELLED}


@dataclass
class Turn:
    """A request of a role other than the actor, whose steps are in the run's attempts. `text` is the reply, mostly JSON."""

    key: str
    role: str
    at: float
    text: str = ""
    wanted: list[dict[str, Any]] = field(default_factory=list)  # tool calls in the reply
    failure: str = ""
    tokens: int = 0


@dataclass
class Spending:
    """What the ledger does not keep: tokens by kind, and how long it took. Cached tokens are part of the prompt's."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ms: float = 0.0


@dataclass(frozen=True)
class Moment:
    """One line of the timeline. `level` is info, good, warn or bad; `key` is the place in the run."""

    seq: int
    at: float
    kind: EventKind
    title: str
    level: str = "info"
    key: str = ""


@dataclass(frozen=True)
class StateChange:
    """A task came into `state`. An edit of the plan changes states too: it shows as the state that the next change left."""

    at: float
    state: str
    reason: str


@dataclass
class Story:
    """A whole run, or the part of it that the journal has. Feed `hear` in order; read everything else."""

    run: RunState = field(default_factory=RunState)
    turns: dict[str, Turn] = field(default_factory=dict)  # by key, in order
    roles: dict[str, str] = field(default_factory=dict)  # key of a request → role
    spending: dict[str, Spending] = field(default_factory=dict)  # by role, and TOOLS
    settled_at: dict[str, float] = field(default_factory=dict)  # key of a tool call → when it was settled
    timeline: list[Moment] = field(default_factory=list)
    last_hash: str = ""
    usd_known: bool = True  # false: a model without a known price was used

    def hear(self, event: Event) -> Moment:
        """Take in the next event; what it adds to the timeline is returned."""
        self.run.apply(event)
        self.last_hash = event.hash
        match event.kind:
            case EventKind.LLM_REQUESTED | EventKind.LLM_REPLIED | EventKind.LLM_FAILED:
                self._hear_model(event)
            case EventKind.TOOL_SETTLED:
                self.settled_at[event.data["key"]] = event.at
                self._spend(TOOLS).ms += float(event.data.get("ms") or 0.0)
        title, level = describe(event)
        moment = Moment(event.seq, event.at, event.kind, one_line(title, 240), level, str(event.data.get("key") or ""))
        self.timeline.append(moment)
        return moment

    def _hear_model(self, event: Event) -> None:
        data, key = event.data, str(event.data["key"])
        role = self.roles.setdefault(key, str(data.get("role", "")))
        if role != "actor":
            turn = self.turns.setdefault(key, Turn(key, role, event.at))
            reply = data.get("reply") or {}
            turn.text, turn.wanted = str(reply.get("text") or turn.text), list(reply.get("tool_calls") or turn.wanted)
            turn.failure = str(data.get("message") or "") if event.kind is EventKind.LLM_FAILED else ""
        usage, spent = data.get("usage") or {}, self._spend(role)
        if usage and data.get("usd", 0.0) is None:
            self.usd_known = False
        spent.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        spent.cached_tokens += int(usage.get("cached_tokens") or 0)
        spent.completion_tokens += int(usage.get("completion_tokens") or 0)
        spent.ms += float(data.get("ms") or 0.0)

    def _spend(self, role: str) -> Spending:
        return self.spending.setdefault(role, Spending())

    @property
    def seconds(self) -> float:
        """Wall-clock seconds from the start to the last event, pauses included."""
        return max(0.0, self.run.last_at - self.run.started_at)

    def cost_of_role(self, role: str) -> Cost:
        total = Cost()
        for key, cost in self.run.ledger.by_key.items():
            if self.roles.get(key, TOOLS) == role:
                total += cost
        return total

    def states_of(self, task_id: str) -> list[StateChange]:
        """The states of a task in order, from its first change."""
        found: list[StateChange] = []
        for change in self.run.history:
            if change["task_id"] != task_id:
                continue
            at, before, reason = float(change["at"]), str(change["from"]), str(change.get("reason") or "")
            if found and found[-1].state != before:
                found.append(StateChange(at, before, "by an edit of the plan"))
            found.append(StateChange(at, str(change["to"]), reason))
        return found

    def turns_of(self, task_id: str, attempt: int) -> list[Turn]:
        return [turn for key, turn in self.turns.items() if attempt_of(key) == (task_id, attempt)]

    def other_turns(self) -> list[Turn]:
        """Planning and the final answer: what belongs to no task."""
        return [turn for key, turn in self.turns.items() if attempt_of(key) is None]

    def attempts(self) -> list[Attempt]:
        """Of all tasks, in the plan's order."""
        return [attempt for node in self.run.plan.walk() for attempt in self.run.attempts_of(node.id)]

    def calls(self) -> list[CallRecord]:
        """Every tool call that has an outcome, in the order in which they ended."""
        found = [call for attempt in self.attempts() for step in attempt.steps.values() for call in step.calls]
        ended = [call for call in found if call.key in self.settled_at]
        return sorted(ended, key=lambda call: self.settled_at[call.key])


def tell(events: Iterable[Event]) -> Story:
    """The story of one run's events, from its first. The same events always give the same story."""
    story = Story()
    for event in events:
        story.hear(event)
    return story


def describe(event: Event) -> tuple[str, str]:
    """An event in a line, and its level: info, good, warn or bad."""
    data = event.data
    match event.kind:
        case EventKind.RUN_STARTED:
            return f"Run started: {data['goal']}", "info"
        case EventKind.RUN_RESUMED:
            return f"Run resumed {_because(data)}".strip(), "warn"
        case EventKind.RUN_ENDED:
            return f"Run {data['state']}{_colon(data.get('reason'))}", "good" if data["state"] == "done" else "bad"
        case EventKind.SESSION_OPENED:
            again = data.get("reason") == "gone"
            return ("Sandbox session opened again" if again else "Sandbox session opened"), "warn" if again else "info"
        case EventKind.BREAKER_CHANGED:
            level = "good" if data.get("state") == "closed" else "bad"
            return f"Circuit breaker {data['name']} is {data['state']} after {data.get('failures', 0)} failures", level
        case EventKind.NOTE:
            return str(data["text"]), "warn"
        case EventKind.LLM_REQUESTED:
            return f"{data.get('role')} asks the model", "info"
        case EventKind.LLM_REPLIED:
            return f"{data.get('role')}{_colon(_reply_in_short(data.get('reply') or {}))}", "info"
        case EventKind.LLM_FAILED:
            return f"The model failed {data.get('role')}{_colon(data.get('message') or data.get('code'))}", "bad"
        case EventKind.TOOL_INTENDED:
            return f"Calling {data['tool']}", "info"
        case EventKind.TOOL_SETTLED:
            outcome = data.get("outcome") or {}
            done = outcome.get("kind") == "done"
            reason = (
                "" if done else f" ({outcome.get('code')}){_colon(_what_failed(str(outcome.get('observation') or '')))}"
            )
            return f"{outcome.get('tool')}: {outcome.get('kind')}{reason}", "good" if done else "bad"
        case _:
            return _describe_plan(event)


def _describe_plan(event: Event) -> tuple[str, str]:
    data = event.data
    match event.kind:
        case EventKind.PLAN_GENERATED:
            return f"Plan of {len(data['tasks'])} tasks: " + "; ".join(
                str(task["goal"]) for task in data["tasks"]
            ), "info"
        case EventKind.PLAN_EDITED:
            verbs = ", ".join(f"{entry.get('op')} {entry.get('task_id') or ''}".strip() for entry in data["operations"])
            refused = f" (refused: {data['rejected']})" if data.get("rejected") else ""
            return (
                f"Plan edited ({verbs or 'no change'}){_colon(data.get('reason'))}{refused}",
                "warn" if verbs else "info",
            )
        case EventKind.TASK_CHANGED:
            state = TaskState(data["to"])
            level = "good" if state is TaskState.SUCCESS else "bad" if state in _BAD else "info"
            return f"{data['task_id']} is {state}{_colon(data.get('reason'))}", level
        case EventKind.TASK_SUBMITTED:
            return f"{data['task_id']} submitted{_colon(data.get('result'))}", "info" if data.get("success") else "bad"
        case EventKind.TASK_JUDGED:
            passed = data["verdict"] == "pass"
            return (
                f"{data['task_id']} judged {data['verdict']}{_colon(data.get('criticism'))}",
                "good" if passed else "bad",
            )
        case _:
            return (
                f"{data.get('task_id', '')} {event.kind.replace('_', ' ')}{_colon(data.get('summary'))}".strip(),
                "info",
            )


def _colon(text: Any) -> str:
    return f": {text}" if text else ""


def _what_failed(text: str) -> str:
    """Where a traceback says what went wrong, else the first line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return errors[-1] if errors else lines[0] if lines else ""


def _because(data: dict[str, Any]) -> str:
    return f"({data['reason']})" if data.get("reason") else ""


def _reply_in_short(reply: dict[str, Any]) -> str:
    names = ", ".join(str(call.get("name")) for call in reply.get("tool_calls") or [])
    return str(reply.get("text") or "") or (f"calls {names}" if names else "")
