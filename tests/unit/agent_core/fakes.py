"""Peers of the loops for tests: a model that answers by a policy, tools behind a server that counts effects, a journal that dies."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from agent.events import Event, EventKind
from agent.llm.model import LLMFailure, Message, Reply, Request, ToolCall, Usage
from agent.loops.run import Goal, Run, RunResult
from agent.settings import BudgetSettings, LoopSettings, Settings
from agent.store.memory_store import MemoryJournal
from agent.tools.outcome import Invocation, Outcome, OutcomeKind, ToolInfo

Answer = Reply | LLMFailure
Policy = Callable[[Request], Answer]

USAGE = Usage(100, 20)


def text(content: str, finish: Any = "stop") -> Reply:
    return Reply(content, (), finish, USAGE, "fake")


def calls(*wanted: tuple[str, Any], thought: str = "I go on.") -> Reply:
    """A reply with calls; arguments that are no text become JSON."""
    made = tuple(
        ToolCall(f"c{i}", name, args if isinstance(args, str) else json.dumps(args))
        for i, (name, args) in enumerate(wanted)
    )
    return Reply(thought, made, "tool_calls", USAGE, "fake")


def submit(result: str = "it is done", *, success: bool = True, **more: Any) -> Reply:
    return calls(("subtask_submit", {"result": result, "success": success, **more}))


def plan(*tasks: dict[str, Any]) -> Reply:
    return calls(("submit_plan", {"tasks": [{"acceptance": ["it holds"], **t} for t in tasks]}))


def verdict(*, passed: bool = True, criticism: str = "") -> Reply:
    return calls(("submit_verdict", {"verdict": "pass" if passed else "fail", "criticism": criticism}))


def reflection(summary: str = "noted", plan_lessons: Iterable[str] = (), tool_lessons: Iterable[str] = ()) -> Reply:
    told = {"summary": summary, "plan_lessons": list(plan_lessons), "tool_lessons": list(tool_lessons)}
    return calls(("submit_reflection", told))


def refine(*operations: dict[str, Any], reason: str = "") -> Reply:
    return calls(("refine_plan", {"operations": list(operations) or [{"op": "exit"}], "reason": reason}))


class FakeModel:
    """`requests` are all that came in; the policy sees nothing but the request, so a new process answers alike."""

    name = "fake"

    def __init__(self, policy: Policy, *, price: float = 0.0, on_reply: Callable[[], None] = lambda: None) -> None:
        self._policy, self._price, self._on_reply = policy, price, on_reply
        self.requests: list[Request] = []

    async def complete(self, request: Request, *, deadline_s: float) -> Reply:
        assert deadline_s > 0
        self.requests.append(request)
        answer = self._policy(request)
        self._on_reply()
        if isinstance(answer, LLMFailure):
            raise answer
        return answer

    def estimate_tokens(self, request: Request) -> int:
        return sum(len(m.content) + sum(len(c.arguments) for c in m.tool_calls) for m in request.messages) // 3 + 50

    def price_usd(self, usage: Usage) -> float:
        return usage.total * self._price

    async def close(self) -> None:
        return None

    def by_role(self, role: str) -> list[Request]:
        return [r for r in self.requests if r.role == role]


@dataclass
class FakeServer:
    """What outlives the agent's process: outcomes by call id, and how often each call had its effect."""

    behave: Callable[[str, dict[str, Any]], Outcome | str] = lambda tool, args: (
        f"{tool} said {json.dumps(args, sort_keys=True)}"
    )
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    effects: Counter[str] = field(default_factory=Counter)
    on_effect: Callable[[], None] = lambda: None

    def run(self, call_id: str, tool: str, arguments: dict[str, Any]) -> Outcome:
        if call_id not in self.outcomes:
            self.effects[call_id] += 1
            told = self.behave(tool, arguments)
            self.outcomes[call_id] = (
                told if isinstance(told, Outcome) else Outcome(OutcomeKind.DONE, tool, call_id, "ok", told, "yes")
            )
            self.on_effect()
        return self.outcomes[call_id]


def info(name: str) -> ToolInfo:
    return ToolInfo(name, f"Does {name}.", {"type": "object", "properties": {"x": {}}})


class FakeTools:
    """The handler's order in short: memo, exact name, arguments, intent, send with the same id, settle."""

    def __init__(self, journal: MemoryJournal, server: FakeServer, names: Iterable[str] = ("look", "write")) -> None:
        self._journal, self._server = journal, server
        self._tools = {n: info(n) for n in names}

    async def catalog(self) -> tuple[ToolInfo, ...]:
        return tuple(self._tools.values())

    async def call(self, invocation: Invocation) -> Outcome:
        known = self._journal.settled(EventKind.TOOL_SETTLED, invocation.key)
        if known is not None:
            return Outcome.from_json(known.data["outcome"])
        outcome = self._refusal(invocation)
        call_id = f"call-{invocation.key}"
        if outcome is None:
            arguments = json.loads(invocation.arguments)
            if self._journal.settled(EventKind.TOOL_INTENDED, invocation.key) is None:
                place = {"key": invocation.key, "call_id": call_id, "tool": invocation.tool, "arguments": arguments}
                self._journal.append(
                    EventKind.TOOL_INTENDED, {**place, "task_id": invocation.task_id, "effect": "once"}
                )
            outcome = self._server.run(call_id, invocation.tool, arguments)
        settled = {"key": invocation.key, "call_id": call_id, "outcome": outcome.as_json(), "ms": 1.0}
        self._journal.append(EventKind.TOOL_SETTLED, settled)
        return outcome

    def _refusal(self, invocation: Invocation) -> Outcome | None:
        if invocation.tool not in self._tools:
            names = ", ".join(self._tools)
            return Outcome(OutcomeKind.UNKNOWN_TOOL, invocation.tool, "", "tool_not_found", f"There are: {names}.")
        try:
            json.loads(invocation.arguments)
        except ValueError as error:
            return Outcome(OutcomeKind.INVALID, invocation.tool, "", "invalid_json", f"No JSON: {error}")
        return None

    async def close(self) -> None:
        return None


class Killed(BaseException):
    """kill -9: nothing of the process goes on."""


class MortalJournal(MemoryJournal):
    """Dies around its n-th append, before it is on the disk or after it; then nothing can be written any more."""

    def __init__(self, run_id: str, events: list[Event], *, die_at: int | None = None, before: bool = False) -> None:
        super().__init__(run_id, events)
        self._left, self._before, self._dead = die_at, before, False

    def append(self, kind: EventKind, data: dict[str, Any]) -> Event:
        if self._left is not None:
            self._left -= 1
        if self._dead or (self._before and self._left == 0):
            self._dead = True
            raise Killed
        event = super().append(kind, data)
        if self._left == 0:
            self._dead = True
            raise Killed
        return event


def settings(*, loop: dict[str, Any] | None = None, budget: dict[str, Any] | None = None, **llm: Any) -> Settings:
    base = Settings()
    return base.model_copy(
        update={
            "loop": LoopSettings(**(loop or {})),
            "budget": BudgetSettings(**(budget or {})),
            "llm": base.llm.model_copy(update=llm),
        }
    )


@dataclass
class World:
    """One run's disk and server, which processes come and go on."""

    policy: Policy
    server: FakeServer = field(default_factory=FakeServer)
    events: list[Event] = field(default_factory=list)
    options: Settings = field(default_factory=settings)
    price: float = 0.0
    llm_calls: int = 0
    models: list[FakeModel] = field(default_factory=list)
    tools: Iterable[str] = ("look", "write")

    def process(self, *, die_at: int | None = None, before: bool = False) -> Run:
        journal = MortalJournal("run1", self.events, die_at=die_at, before=before)
        model = FakeModel(self.policy, price=self.price)
        self.models.append(model)
        return Run(
            journal=journal,
            models=lambda _role: model,
            tools=FakeTools(journal, self.server, self.tools),
            settings=self.options,
            goal=Goal("find out", ({"path": "data.csv", "bytes": 10, "sha256": "00"},)),
        )

    async def run(self) -> RunResult:
        return await self.process().execute()

    @property
    def requests(self) -> list[Request]:
        return [r for m in self.models for r in m.requests]

    def asked(self, role: str) -> list[Request]:
        return [r for r in self.requests if r.role == role]

    def kinds(self, kind: EventKind) -> list[dict[str, Any]]:
        return [e.data for e in self.events if e.kind is kind]


def prompt(request: Request) -> str:
    return "\n".join(m.content for m in request.messages)


def task_of(request: Request) -> str:
    """The task that the request is about."""
    return str(re.findall(r"^Task (t[\d.]+): ", prompt(request), re.MULTILINE)[-1])


def attempt_of(request: Request) -> int:
    """The attempt, told by the earlier ones that the prompt names."""
    return 1 + len(re.findall(r"^- attempt \d+: ", prompt(request), re.MULTILINE))


def answered(request: Request) -> list[Message]:
    return [m for m in request.messages if m.role == "tool"]


def by_role(**answers: Callable[[Request], Answer]) -> Policy:
    """A policy with defaults that let everything succeed at once."""
    usual: dict[str, Callable[[Request], Answer]] = {
        "plan_generator": lambda _: plan({"goal": "first"}, {"goal": "second", "depends_on": ["t1"]}),
        "actor": lambda _: submit(),
        "critic": lambda _: verdict(),
        "reflector": lambda _: reflection(),
        "plan_refiner": lambda _: refine(),
        "summariser": lambda _: text("The answer is 42."),
    }
    return lambda request: {**usual, **answers}[request.role](request)
