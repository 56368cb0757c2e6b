"""Where the roles ask a model: memo first, then room in the budget, then the journal, then the request.

A reply is journalled before anyone acts on it, and a key that has its reply is never asked again. So is a failure that is
part of the run's course (incomplete, filtered, overflow); one that stops the run is asked again on resume.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from agent.budget import Budget
from agent.errors import ModelRefused, Unreachable
from agent.events import Event, EventKind
from agent.llm.model import ChatModel, FailureKind, LLMFailure, Message, Reply, Request, ToolCall, ToolSpec, Usage
from agent.llm.pricing import price_of
from agent.llm.structured_output import Problem, corrective_messages, parse_reply
from agent.planning.plan import PlanRefused
from agent.roles.context import MAX_SQUEEZE, Room
from agent.settings import LLMSettings
from agent.store.base import Journal
from agent.store.hash_chain import canonical

T = TypeVar("T")

# part of the run's course: handled where the question was asked
_HANDLED = frozenset({FailureKind.INCOMPLETE, FailureKind.FILTERED, FailureKind.OVERFLOW})

_BROKEN = "Your last reply did not arrive whole, so nothing of it was taken. Call {tool} once, briefly and plainly."


class NoValidAnswer(Exception):  # noqa: N818 - each role knows what to do without an answer
    """A role gave no answer that holds, corrective turns included."""


class Desk:
    """One run's way to its models. Feed every event of the run to `apply`, old ones first."""

    def __init__(
        self,
        journal: Journal,
        budget: Budget,
        models: Callable[[str], ChatModel],
        settings: LLMSettings,
        corrections: int,
    ) -> None:
        self._journal, self._budget, self._models, self._settings = journal, budget, models, settings
        self._corrections = corrections
        self._failures: dict[str, LLMFailure] = {}

    def apply(self, event: Event) -> None:
        if event.kind is EventKind.LLM_FAILED and event.data["code"] in _HANDLED:
            self._failures.setdefault(
                event.data["key"], LLMFailure(FailureKind(event.data["code"]), str(event.data["message"]))
            )

    def request(
        self, role: str, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = (), *, required: bool = False
    ) -> Request:
        settings = self._settings
        return Request(
            role, messages, tools, "required" if required else "auto", settings.max_tokens, settings.temperature
        )

    def fits(self, request: Request) -> bool:
        """Whether the prompt, with room for a reply, is within the model's context by our estimate."""
        prompt = self._models(request.role).estimate_tokens(request)
        room = min(request.max_tokens, self._settings.context_tokens // 4)
        return prompt + room <= self._settings.context_tokens

    async def ask(self, key: str, request: Request) -> Reply:
        """The reply settled under `key`, else a new one.

        Raises LLMFailure of the kinds incomplete, filtered and overflow; Unreachable, ModelRefused and BudgetExhausted, which end
        the run.
        """
        settled = self._journal.settled(EventKind.LLM_REPLIED, key)
        if settled is not None:
            return _reply_from(settled.data)
        if key in self._failures:
            raise self._failures[key]
        return await self._ask_anew(key, request)

    async def _ask_anew(self, key: str, request: Request) -> Reply:
        model = self._models(request.role)
        prompt = model.estimate_tokens(request)
        reserved = self._budget.reserve_llm(
            prompt, self._room(prompt, request), lambda p, c: model.price_usd(Usage(p, c))
        )
        request = replace(request, max_tokens=reserved.max_tokens)
        place = {"key": key, "role": request.role, "model": model.name}
        digest = hashlib.sha256(canonical(asdict(request)).encode()).hexdigest()
        reservation = {"tokens": reserved.tokens, "usd": reserved.usd}
        self._journal.append(EventKind.LLM_REQUESTED, {**place, "reserved": reservation, "prompt_sha256": digest})
        begun = time.monotonic()
        left = self._budget.seconds_left
        try:
            async with asyncio.timeout(left):
                reply = await model.complete(
                    request, deadline_s=min(self._settings.total_s, left or self._settings.total_s)
                )
        except LLMFailure as failure:
            self._journal_failure(place, failure, begun, model)
            raise self._ending(failure) from failure
        except TimeoutError:
            late = LLMFailure(FailureKind.TIMEOUT, "the run's time was used up while the model answered")
            self._journal_failure(place, late, begun, model)
            raise self._budget.out_of_time() from None
        self._journal.append(
            EventKind.LLM_REPLIED,
            {
                **place,
                "model": reply.model,
                "reply": _reply_json(reply),
                "usage": asdict(reply.usage),
                "usd": self._usd(model, reply.usage),
                "ms": _ms(begun),
            },
        )
        return reply

    def _usd(self, model: ChatModel, usage: Usage) -> float | None:
        """None, not 0, when nobody knows the model's price."""
        return model.price_usd(usage) or (0.0 if price_of(model.name, self._settings).known else None)

    def _room(self, prompt: int, request: Request) -> int:
        """Tokens of the reply: what was asked for, or what the context leaves when that is less."""
        return max(16, min(request.max_tokens, self._settings.context_tokens - prompt))

    def _journal_failure(self, place: dict[str, Any], failure: LLMFailure, begun: float, model: ChatModel) -> None:
        usage = failure.usage
        cost = {} if usage is None else {"usage": asdict(usage), "usd": self._usd(model, usage)}
        data = {**place, "code": str(failure.kind), "message": failure.message, "ms": _ms(begun), **cost}
        self._journal.append(EventKind.LLM_FAILED, data)

    def _ending(self, failure: LLMFailure) -> Exception:
        """`failure` itself when its place handles it, else what it means for the run."""
        left = self._budget.seconds_left
        if failure.kind in _HANDLED:
            return failure
        if left is not None and left <= 0:
            return self._budget.out_of_time()
        if failure.kind is FailureKind.REFUSED:
            return ModelRefused(f"the model's server refused the request: {failure.message}")
        why = failure.message.rstrip(".")
        return Unreachable(
            f"the model gave no reply ({failure.kind}): {why}. Resume the run when the model answers again."
        )

    async def ask_structured(
        self,
        place: str,
        role: str,
        build: Callable[[Room], tuple[Message, ...]],
        tool: ToolSpec,
        accept: Callable[[dict[str, Any]], T],
    ) -> T:
        """The arguments of `tool`, as `accept` makes of them, after at most the allowed corrective turns.

        `accept` raises PlanRefused for an answer that has the right form and can't be taken. A prompt that does not fit the
        context is built again in a smaller room. Raises NoValidAnswer, and what `ask` raises to end the run.
        """
        squeeze, problem = 0, "it gave no answer"
        correction: tuple[Message, ...] = ()
        for turn in range(1 + self._corrections):
            squeeze = self._squeeze(role, build, tool, squeeze)
            messages = (*build(Room.squeezed(squeeze)), *correction)
            try:
                reply = await self.ask(f"{place}/r{turn}", self.request(role, messages, (tool,), required=True))
            except LLMFailure as failure:
                problem = failure.message
                if failure.kind is FailureKind.OVERFLOW:
                    squeeze, correction = squeeze + 1, ()
                else:  # the very same request would get the very same reply from many servers
                    correction = (Message("user", _BROKEN.format(tool=tool.name)),)
                continue
            answer = parse_reply(reply, tool)
            if not isinstance(answer, Problem):
                try:
                    return accept(answer.value)
                except PlanRefused as refused:
                    answer = Problem("\n".join(refused.problems), _call_id(reply, tool))
            problem, correction = answer.message, corrective_messages(reply, answer, tool)
        raise NoValidAnswer(f"the {role.replace('_', ' ')} gave no valid answer: {problem}")

    def _squeeze(self, role: str, build: Callable[[Room], tuple[Message, ...]], tool: ToolSpec, level: int) -> int:
        while level < MAX_SQUEEZE and not self.fits(self.request(role, build(Room.squeezed(level)), (tool,))):
            level += 1
        return min(level, MAX_SQUEEZE)


def _call_id(reply: Reply, tool: ToolSpec) -> str | None:
    return next((call.id for call in reply.tool_calls if call.name == tool.name), None)


def _ms(begun: float) -> float:
    return round((time.monotonic() - begun) * 1000, 1)


def _reply_json(reply: Reply) -> dict[str, Any]:
    return {name: value for name, value in asdict(reply).items() if name not in {"usage", "model"}}


def _reply_from(data: dict[str, Any]) -> Reply:
    reply = data["reply"]
    return Reply(
        text=reply["text"],
        tool_calls=tuple(ToolCall(**call) for call in reply["tool_calls"]),
        finish_reason=reply["finish_reason"],
        usage=Usage(**data["usage"]),
        model=data["model"],
        attempts=reply.get("attempts", 1),
        extra=reply.get("extra") or {},
        notes=tuple(reply.get("notes") or ()),
    )
