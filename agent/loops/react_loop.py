"""One attempt at a task: ask, run what was asked for, show what came of it, until the task is handed in.

Every request and every call has a key; what is settled under it comes from the journal. So an attempt that was cut off is
simply run again from its first step and arrives where it was, without asking or calling anything twice.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from agent.budget import Budget
from agent.errors import Unreachable
from agent.events import EventKind
from agent.llm.model import FailureKind, LLMFailure, Message, Reply, ToolCall, ToolSpec
from agent.llm.structured_output import Problem, parse_reply
from agent.loops.observation import observation_text, specs
from agent.loops.progress import Progress
from agent.planning.task import TaskNode
from agent.roles import actor
from agent.roles.desk import Desk
from agent.roles.schemas import SUBTASK_SUBMIT
from agent.roles.transcript import Transcript
from agent.settings import Settings
from agent.store.base import Journal
from agent.store.fold import RunState
from agent.tools.outcome import Invocation, Outcome, OutcomeKind, Tools
from agent.trajectory.keys import StepKey
from agent.trajectory.printable import clip
from agent.trajectory.step import Submission

MAX_UNAVAILABLE = 3  # calls in a row for which the ToolServer could not be reached: then the run stops, to be resumed

_REMARKS = {
    "text": "That was no tool call. Call a tool, or subtask_submit when the task is done or can't be done.",
    "empty": "Your reply was empty. Go on with a tool call.",
    "cut": "Your reply was cut at the token limit, so nothing of it was run. Write less at once: smaller calls, shorter thoughts.",
    "broken": "Your last reply did not arrive whole, so nothing of it was run. Go on with a tool call.",
}
_TROUBLE = {
    "text": "it wrote text instead of a call",
    "empty": "its reply was empty",
    "cut": "its reply was cut at the token limit",
    "broken": "its reply did not arrive whole",
}
_NOT_OFFERED = "Not run: no more steps are left for this task. Only subtask_submit is possible now."
_NOT_ALONE = "Not taken: first see the results of the other calls, then call subtask_submit alone."
_WITHHELD = "Not run: this call gave the same result too often. Submit what you have."


def _useless(reply: Reply) -> str | None:
    """The kind of a reply without a usable call; None for one with calls. A cut reply's calls may be cut too."""
    if reply.finish_reason == "length":
        return "cut"
    if reply.finish_reason == "content_filter":
        return "broken"
    if not reply.tool_calls:
        return "empty" if reply.empty else "text"
    return None


def unsubmitted(reason: str) -> Submission:
    return Submission(success=False, result="", reason=reason)


class ReactLoop:
    """The loop for one attempt; made anew for each, also on resume."""

    def __init__(
        self,
        *,
        desk: Desk,
        tools: Tools,
        journal: Journal,
        budget: Budget,
        settings: Settings,
        state: RunState,
        node: TaskNode,
    ) -> None:
        self._desk, self._tools, self._journal, self._budget = desk, tools, journal, budget
        self._settings, self._state, self._node = settings, state, node
        self._transcript, self._progress = Transcript(), Progress()
        self._key = StepKey(node.id, node.attempt, 1)
        self._level = 0
        self._unavailable = 0
        self._asked_for_outputs = False
        self._trouble = ""  # of the last reply that could not be used

    async def work(self) -> Submission:
        """What was handed in, or why nothing was. Raises what ends the run: BudgetExhausted, Unreachable, ModelRefused."""
        limit = self._settings.loop.max_steps
        while self._key.step <= limit:
            must_submit = self._progress.must_submit or self._key.step == limit
            if must_submit and not self._progress.forced():
                break
            submission = await self._turn(must_submit=must_submit)
            if submission is not None:
                return submission
        if self._progress.must_submit:
            told = "it went round in circles and did not hand in a result when it had to"
            return unsubmitted(f"{told}; at last {self._trouble}" if self._trouble else told)
        return unsubmitted(f"it used its {limit} steps without handing in a result")

    async def _turn(self, *, must_submit: bool) -> Submission | None:
        tools = () if must_submit else await self._offered()
        built = actor.request(
            self._desk, self._state, self._node, tools, self._transcript,
            steps_left=self._settings.loop.max_steps, must_submit=must_submit, level=self._level,
        )  # fmt: skip
        if built is None:
            return unsubmitted(
                f"its prompt no longer fits the model's context of {self._settings.llm.context_tokens} tokens"
            )
        asked, level = built
        try:
            reply = await self._desk.ask(self._key.request, asked)
        except LLMFailure as failure:
            return self._take_failure(failure, level)
        useless = _useless(reply)
        if useless is not None:
            self._waste(useless, reply)
            return None
        if must_submit and all(call.name != SUBTASK_SUBMIT.name for call in reply.tool_calls):
            self._answer(reply, [_NOT_OFFERED for _ in reply.tool_calls])
            self._trouble = f"it called {clip(reply.tool_calls[0].name, 80)} where only {SUBTASK_SUBMIT.name} was left"
            self._count("text")
            return None
        return await self._take_calls(reply, must_submit=must_submit)

    async def _offered(self) -> tuple[ToolSpec, ...]:
        """The live tools. One that calls itself subtask_submit is none: that name ends the task."""
        return tuple(tool for tool in specs(await self._tools.catalog()) if tool.name != SUBTASK_SUBMIT.name)

    def _take_failure(self, failure: LLMFailure, level: int) -> Submission | None:
        if failure.kind is not FailureKind.OVERFLOW:
            self._waste("broken", None)
            self._trouble = failure.message
            return None
        if not self._progress.spend("overflow"):
            return unsubmitted(f"the conversation is too long for the model, also when shortened: {failure.message}")
        self._level = max(level + 1, 2)
        self._key = replace(self._key, again=self._key.again + 1)
        return None

    def _waste(self, kind: str, reply: Reply | None) -> None:
        """A reply without a usable call: remarked on, and counted."""
        shown = reply is not None and kind != "broken" and bool(reply.text.strip())
        said = Message("assistant", reply.text, extra=reply.extra) if reply is not None and shown else None
        self._transcript.add(said, Message("user", _REMARKS[kind]))
        self._trouble = _TROUBLE[kind]
        self._count(kind)

    def _count(self, kind: str) -> None:
        self._progress.fruitless()
        if self._progress.spend(kind):
            self._key = replace(self._key, again=self._key.again + 1)
        else:
            self._next_step()

    def _next_step(self) -> None:
        self._key = replace(self._key, step=self._key.step + 1, again=0)

    def _answer(self, reply: Reply, answers: list[str]) -> None:
        back = (
            Message("tool", text, tool_call_id=call.id) for call, text in zip(reply.tool_calls, answers, strict=True)
        )
        self._transcript.add(Message("assistant", reply.text, reply.tool_calls, extra=reply.extra), *back)

    async def _take_calls(self, reply: Reply, *, must_submit: bool) -> Submission | None:
        """Run the calls in order; each gets its answer."""
        answers: list[str] = []
        fruitful = False
        alone = must_submit or all(call.name == SUBTASK_SUBMIT.name for call in reply.tool_calls)
        for index, call in enumerate(reply.tool_calls):
            if call.name == SUBTASK_SUBMIT.name:
                taken = self._take_submission(reply, call, must_submit=must_submit) if alone else _NOT_ALONE
                if isinstance(taken, Submission):
                    return taken
                answers.append(taken)
            elif must_submit:
                answers.append(_NOT_OFFERED)
            else:
                new, text = await self._take_call(index, call)
                fruitful = fruitful or new
                answers.append(text)
        self._answer(reply, answers)
        if fruitful:
            self._progress.fruitful()
        else:
            self._progress.fruitless()
        self._next_step()
        return None

    def _take_submission(self, reply: Reply, call: ToolCall, *, must_submit: bool) -> Submission | str:
        parsed = parse_reply(replace(reply, tool_calls=(call,)), SUBTASK_SUBMIT)
        if isinstance(parsed, Problem):
            self._progress.invalid()
            return parsed.message
        value = parsed.value
        outputs = dict(value.get("outputs") or {})
        missing = [name for name in self._node.outputs if name not in outputs]
        if value["success"] and missing and not must_submit and not self._asked_for_outputs:
            self._asked_for_outputs = True
            return f"Not taken: the declared outputs {', '.join(missing)} are missing. Submit again with them, or without success."
        return Submission(
            success=value["success"],
            result=value["result"],
            outputs=outputs,
            reason=str(value.get("reason") or ""),
            plan_change=str(value.get("plan_change") or ""),
            key=self._key.request,
        )

    async def _take_call(self, index: int, call: ToolCall) -> tuple[bool, str]:
        """Whether it brought something new, and the answer for the model."""
        if index >= self._settings.loop.max_calls_per_step:
            return False, f"Not run: at most {self._settings.loop.max_calls_per_step} calls in one reply."
        if self._progress.withholds(call.name, call.arguments):
            return False, _WITHHELD
        key = self._key.of_call(index)
        known = self._journal.settled(EventKind.TOOL_SETTLED, key) is not None
        if not known and self._journal.settled(EventKind.TOOL_INTENDED, key) is None:
            self._budget.reserve_tool_call()
        outcome = await self._run(Invocation(key, self._node.id, call.name, call.arguments), known=known)
        new, remark = self._progress.saw(call.arguments, outcome)
        text = observation_text(outcome, 2 * self._settings.toolserver.max_observation_chars)
        return new, f"{text}\n{remark}" if remark else text

    async def _run(self, invocation: Invocation, *, known: bool) -> Outcome:
        try:
            async with asyncio.timeout(None if known else self._budget.seconds_left):
                outcome = await self._tools.call(invocation)
        except TimeoutError:
            raise self._budget.out_of_time() from None
        if known:
            return outcome
        self._unavailable = self._unavailable + 1 if outcome.kind is OutcomeKind.UNAVAILABLE else 0
        if self._unavailable >= MAX_UNAVAILABLE:
            raise Unreachable(f"the ToolServer can't be reached: {outcome.observation} Resume the run when it can.")
        return outcome
