"""Long tool outputs made short by the model: bounded, remembered, and never the end of a run."""

from __future__ import annotations

from collections.abc import Callable

from agent.budget import worst_case
from agent.events import EventKind
from agent.llm.model import FailureKind, LLMFailure, Request
from agent.loops.run import Goal, Run
from agent.settings import LoopSettings
from agent.store.memory_store import MemoryJournal
from agent.tools.outcome import Invocation, Outcome
from tests.unit.agent_core.fakes import (
    Answer,
    FakeModel,
    FakeServer,
    FakeTools,
    calls,
    plan,
    reflection,
    settings,
    submit,
    text,
    verdict,
)

LONG = "row\n" * 5000


class LongTools(FakeTools):
    """Each call asks the run to shorten what it said, as the handler does."""

    run: Run
    shortened: list[str]

    async def call(self, invocation: Invocation) -> Outcome:
        said = f"{invocation.arguments}\n{LONG}"
        self.shortened.append(await self.run.condense(said, 500))
        return await super().call(invocation)


def model(condensed: Callable[[], Answer], looks: int) -> FakeModel:
    def policy(request: Request) -> Answer:
        match request.role:
            case "plan_generator":
                return plan({"goal": "look"}, {"goal": "look again"})
            case "actor":
                done = sum(message.role == "assistant" for message in request.messages)
                return submit() if done >= looks else calls(("look", {"x": done}))
            case "critic":
                return verdict()
            case "reflector":
                return reflection()
            case _:
                long = any("tool output" in message.content for message in request.messages)
                return condensed() if long else text("the answer")

    return FakeModel(policy)


async def finish(
    condensed: Callable[[], Answer], looks: int = 2, max_summaries: int = 20
) -> tuple[LongTools, MemoryJournal, str]:
    journal = MemoryJournal("r1", [])
    tools = LongTools(journal, FakeServer())
    tools.shortened = []
    peer = model(condensed, looks)
    options = settings(loop={"max_summaries": max_summaries})
    tools.run = Run(journal=journal, models=lambda _: peer, tools=tools, settings=options, goal=Goal("look at it"))
    result = await tools.run.execute()
    return tools, journal, result.state


async def test_a_long_output_is_shortened_by_the_model_and_journalled() -> None:
    tools, journal, state = await finish(lambda: text("5,000 rows, all alike"))
    assert state == "done"
    assert tools.shortened == ["5,000 rows, all alike"] * 4
    asked = [
        e.data["key"]
        for e in journal.events()
        if e.kind is EventKind.LLM_REQUESTED and e.data["key"].startswith("summary/")
    ]
    assert len(asked) == len(set(asked)) == 2  # the second task saw the same two outputs: they are not paid for again


async def test_a_run_has_only_so_many_summaries() -> None:
    tools, _, state = await finish(lambda: text("short"), looks=4, max_summaries=3)
    assert state == "done"
    assert tools.shortened[:4] == ["short", "short", "short", ""]


async def test_a_summary_that_can_not_be_had_is_no_end_of_the_run() -> None:
    for kind in FailureKind:
        failure = LLMFailure(kind, "no")
        tools, _, state = await finish(lambda failure=failure: failure, looks=1)  # type: ignore[misc]
        assert state == "done"
        assert tools.shortened == ["", ""]


def test_the_bound_counts_the_summaries() -> None:
    without = worst_case(LoopSettings(max_summaries=0))
    assert worst_case(LoopSettings(max_summaries=7)).llm_calls == without.llm_calls + 7
