"""Writes the final answer from the tasks' results, a plain one without a model when it has to, and shortens long outputs."""

from __future__ import annotations

import hashlib

from agent.errors import BudgetExhausted, ModelRefused, Unreachable
from agent.llm.model import FailureKind, LLMFailure, Message
from agent.planning.plan import Plan
from agent.planning.task import TaskState
from agent.roles.context import MAX_SQUEEZE, Room, as_text, plan_outline
from agent.roles.desk import Desk, NoValidAnswer
from agent.roles.fence import RULE, fence
from agent.roles.prompt_file import render
from agent.store.fold import RunState
from agent.trajectory.keys import ANSWER, SUMMARY
from agent.trajectory.printable import clip, printable

ROLE = "summariser"


async def summarise(desk: Desk, state: RunState, *, turns: int, complete: bool) -> str:
    """The answer for the person who set the goal. Raises NoValidAnswer, and what the desk raises to end the run."""
    squeeze, problem = 0, "it gave no text"
    for turn in range(turns):
        while squeeze < MAX_SQUEEZE and not desk.fits(
            desk.request(ROLE, _messages(state, Room.squeezed(squeeze), complete))
        ):
            squeeze += 1
        request = desk.request(ROLE, _messages(state, Room.squeezed(min(squeeze, MAX_SQUEEZE)), complete))
        try:
            reply = await desk.ask(f"{ANSWER}/r{turn}", request)
        except LLMFailure as failure:
            problem = failure.message
            squeeze += failure.kind is FailureKind.OVERFLOW
            continue
        text = printable(reply.text).strip()
        if text and reply.finish_reason != "content_filter":
            return text if reply.finish_reason != "length" else f"{text} [cut off at the token limit]"
    raise NoValidAnswer(f"the summariser gave no answer: {problem}")


async def condense(desk: Desk, text: str, max_chars: int) -> str:
    """A tool's long output in about `max_chars` characters; empty when none is to be had, and the caller then cuts it.

    What would end the run (no budget, no model) is left for the next question to find: the call's outcome is settled first.
    The key is the text's own hash, so the same output is shortened once.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    user = render("condenser", output=fence("tool output", text, len(text)), max_chars=str(max_chars))
    messages = (Message("system", render("condenser_system", rule=RULE)), Message("user", user))
    request = desk.request(ROLE, messages)
    if not desk.fits(request):
        return ""
    try:
        reply = await desk.ask(f"{SUMMARY}/{digest}", request)
    except (LLMFailure, BudgetExhausted, ModelRefused, Unreachable):
        return ""
    return printable(reply.text).strip() if reply.finish_reason == "stop" else ""


def _messages(state: RunState, room: Room, complete: bool) -> tuple[Message, ...]:  # noqa: FBT001 - private, two callers
    results = []
    for node in state.plan.walk():
        if node.state is TaskState.SUCCESS and state.plan.is_leaf(node.id):
            results.append(fence(f"result of {node.id}: {clip(node.goal, 80)}", node.result, room.result))
            if node.output_values:
                results.append(fence(f"outputs of {node.id}", as_text(node.output_values), room.result))
    user = render(
        "summariser",
        goal=clip(state.goal, room.goal),
        plan=plan_outline(state.plan, room),
        results="\n".join(results) or "(no task succeeded)",
        standing="All tasks are done." if complete else "Not everything was done: say plainly what is missing and why.",
    )
    return Message("system", render("summariser_system", rule=RULE)), Message("user", user)


def partial_answer(plan: Plan, reason: str) -> str:
    """What is known, in plain words, without a model."""
    lines = [f"Not finished: {reason}"] if reason else []
    for node in plan.walk():
        if not plan.is_leaf(node.id):
            continue
        told = node.result if node.state is TaskState.SUCCESS else (node.reason or node.result)
        lines.append(f"- {node.id} ({node.state}) {clip(node.goal, 200)}{f': {clip(told, 2000)}' if told else ''}")
    return printable("\n".join(lines) or "Nothing was done.")
