"""The inner loop against a model that misbehaves: every course ends soon, nothing unvalidated runs, nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from agent.events import EventKind
from agent.llm.model import FailureKind, LLMFailure, Reply, Request
from agent.store.fold import fold
from agent.tools.outcome import Outcome, OutcomeKind
from agent.trajectory.step import Submission
from tests.unit.agent_core.fakes import (
    Answer,
    FakeServer,
    World,
    answered,
    by_role,
    calls,
    plan,
    prompt,
    settings,
    submit,
    task_of,
    text,
)


async def attempt(
    act: Callable[[Request], Answer], *, goal: str = "a", **world: Any
) -> tuple[World, Submission, list[Request]]:
    """The first task's only attempt under `act`; the second task submits at once."""
    policy = by_role(
        actor=lambda r: act(r) if task_of(r) == "t1" else submit(),
        plan_generator=lambda _: plan({"goal": goal}, {"goal": "b"}),
    )
    made = World(policy, **world)
    await made.run()
    submission = fold(made.events).attempts["t1", 1].submission
    assert submission is not None
    return made, submission, [r for r in made.asked("actor") if task_of(r) == "t1"]


def only_submit(request: Request) -> bool:
    return [t.name for t in request.tools] == ["subtask_submit"] and request.tool_choice == "required"


async def test_the_same_call_for_ever_is_run_three_times_and_ends_in_a_forced_submission() -> None:
    world, submission, asked = await attempt(
        lambda r: submit("gave up") if only_submit(r) else calls(("look", {"x": 1}))
    )
    assert sum(world.server.effects.values()) == 3
    assert len(asked) == 5
    assert submission.result == "gave up"
    told = prompt(asked[-1])
    assert "same call with the same result as before" in told
    assert "will not be run any more" in told


async def test_two_calls_in_turn_for_ever_are_stopped_too() -> None:
    turn = count()
    world, _, asked = await attempt(lambda r: submit() if only_submit(r) else calls(("look", {"x": next(turn) % 2})))
    assert len(asked) <= 7
    assert sum(world.server.effects.values()) <= 6


async def test_a_model_that_never_submits_is_stopped_after_two_forced_tries() -> None:
    _, submission, asked = await attempt(lambda _: calls(("look", {"x": 1})))
    assert not submission.success
    assert "went round in circles" in submission.reason
    assert len(asked) == 6


async def test_polling_a_job_that_moves_is_not_stopped() -> None:
    ticks = count()
    server = FakeServer(behave=lambda *_: f"{next(ticks)} of 10")
    world, submission, _ = await attempt(
        lambda r: submit("polled") if "10 of 10" in prompt(r) else calls(("look", {})), server=server
    )
    assert submission.result == "polled"
    assert sum(world.server.effects.values()) == 11


async def test_a_test_run_again_after_each_repair_is_not_stopped() -> None:
    def work(request: Request) -> Reply:
        n = len(answered(request))
        return submit("ok") if n >= 10 else calls(("write", {"x": n}) if n % 2 == 0 else ("look", {"x": "tests"}))

    server = FakeServer(behave=lambda tool, args: "1 failed" if tool == "look" else f"wrote {args}")
    world, submission, _ = await attempt(work, server=server)
    assert submission.result == "ok"
    assert sum(world.server.effects.values()) == 10


async def test_new_arguments_for_ever_use_the_steps_up_and_the_last_must_submit() -> None:
    fresh = count()
    world, submission, asked = await attempt(
        lambda r: submit("as far as I came") if only_submit(r) else calls(("look", {"x": next(fresh)}))
    )
    assert len(asked) == 15
    assert [only_submit(r) for r in asked] == [False] * 14 + [True]
    assert submission.result == "as far as I came"
    assert sum(world.server.effects.values()) == 14


@pytest.mark.parametrize(
    "bad",
    [
        lambda n: calls((f"invented_{n}", {})),
        lambda n: calls(("look", f'{{"x": {n}')),
        lambda _: text(""),
        lambda n: text(f"I think about it, {n}"),
        lambda _: Reply("so lon", (), "length", text("").usage, "fake"),
        lambda _: LLMFailure(FailureKind.INCOMPLETE, "no finish reason"),
        lambda _: LLMFailure(FailureKind.FILTERED, "filtered"),
        lambda n: calls(("subtask_submit", {"result": n})),
    ],
    ids=["invented_tools", "broken_json", "empty", "prose", "cut", "incomplete", "filtered", "invalid_submission"],
)
async def test_useless_replies_for_ever_end_the_attempt_in_few_calls_without_an_effect(
    bad: Callable[[int], Answer],
) -> None:
    numbers = count()
    world, submission, asked = await attempt(lambda _: bad(next(numbers)))
    assert len(asked) <= 5
    assert not submission.success
    assert not world.server.effects


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (calls(("lok", {})), "There are: look, write."),
        (calls(("look", "{broken")), "No JSON"),
        (text(""), "Your reply was empty"),
        (text("I look now."), "was no tool call"),
        (
            Reply("", calls(("look", '{"x": "cut of')).tool_calls, "length", text("").usage, "fake"),
            "cut at the token limit",
        ),
        (LLMFailure(FailureKind.INCOMPLETE, "broke off"), "did not arrive whole"),
    ],
)
async def test_one_bad_reply_is_answered_and_the_attempt_goes_on(bad: Answer, told: str) -> None:
    replies: Iterator[Answer] = iter([bad, calls(("look", {})), submit("fine")])
    world, submission, asked = await attempt(lambda _: next(replies))
    assert submission.result == "fine"
    assert told in prompt(asked[1])
    assert sum(world.server.effects.values()) == 1


async def test_calls_of_one_reply_run_in_order_and_each_is_answered() -> None:
    ran: list[str] = []

    def behave(tool: str, args: dict[str, Any]) -> str:
        ran.append(f"{tool}{args['x']}")
        return "ok"

    replies = iter(
        [
            calls(
                ("write", {"x": 1}), ("look", {"x": 2}), ("subtask_submit", {"result": "too early", "success": True})
            ),
            submit("then"),
        ]
    )
    _, submission, asked = await attempt(lambda _: next(replies), server=FakeServer(behave=behave))
    assert ran == ["write1", "look2"]
    answers = answered(asked[1])
    assert [a.tool_call_id for a in answers] == ["c0", "c1", "c2"]
    assert "Not taken" in answers[2].content
    assert submission.result == "then"


async def test_calls_beyond_the_limit_of_one_reply_are_not_run() -> None:
    replies = iter([calls(*[("look", {"x": n}) for n in range(12)]), submit()])
    world, _, asked = await attempt(lambda _: next(replies))
    assert sum(world.server.effects.values()) == 8
    assert "at most 8 calls in one reply" in answered(asked[1])[-1].content


async def test_missing_outputs_are_asked_for_once() -> None:
    replies = iter([submit("no outputs"), submit("with them", outputs={"n": 3})])
    world = World(
        by_role(
            plan_generator=lambda _: plan({"goal": "a", "outputs": {"n": "count"}}, {"goal": "b"}),
            actor=lambda r: next(replies) if task_of(r) == "t1" else submit(),
        )
    )
    assert (await world.run()).state == "done"
    assert fold(world.events).plan["t1"].output_values == {"n": 3}


async def test_long_observations_are_clipped_when_the_prompt_no_longer_fits() -> None:
    server = FakeServer(behave=lambda _, args: f"{args['x']} " + "row " * 5000)
    steps = count()
    world, submission, asked = await attempt(
        lambda _: submit("read all") if next(steps) >= 8 else calls(("look", {"x": next(steps)})),
        server=server,
        options=settings(context_tokens=12_000, max_tokens=1000),
    )
    assert submission.result == "read all"
    model = world.models[0]
    assert max(model.estimate_tokens(r) for r in asked) <= 12_000
    assert "characters left out" in prompt(asked[-1])


async def test_overflow_is_answered_with_a_shorter_prompt_once() -> None:
    seen: list[int] = []

    def act(request: Request) -> Answer:
        seen.append(len(prompt(request)))
        if len(answered(request)) == 0:
            return calls(("look", {"x": 1}))
        return (
            LLMFailure(FailureKind.OVERFLOW, "context_length_exceeded") if seen[-1] > 12_000 else submit("short enough")
        )

    _, submission, asked = await attempt(act, server=FakeServer(behave=lambda *_: "x" * 11_000))
    assert submission.result == "short enough"
    assert len(asked) == 3
    assert seen[2] < seen[1]


async def test_overflow_for_ever_fails_the_task_with_its_reason() -> None:
    _, submission, asked = await attempt(lambda _: LLMFailure(FailureKind.OVERFLOW, "too long by 3 tokens"))
    assert not submission.success
    assert "too long for the model, also when shortened: too long by 3 tokens" in submission.reason
    assert len(asked) == 2


async def test_a_context_too_small_for_the_task_fails_it_without_a_call() -> None:
    _, submission, asked = await attempt(
        lambda _: submit(), goal="a " * 2000, options=settings(context_tokens=1024, max_tokens=512)
    )
    assert "no longer fits the model's context of 1024 tokens" in submission.reason
    assert not asked


async def test_an_unknown_outcome_is_told_plainly() -> None:
    unknown = Outcome(OutcomeKind.UNKNOWN, "write", "", "outcome_unknown", "the server died", "possible")
    replies = iter([calls(("write", {})), submit()])
    _, _, asked = await attempt(lambda _: next(replies), server=FakeServer(behave=lambda *_: unknown))
    assert "not known whether this ran (outcome_unknown)" in answered(asked[1])[0].content


async def test_provider_fields_are_echoed() -> None:
    first = calls(("look", {}))
    first.extra["reasoning_content"] = "hm"
    replies = iter([first, submit()])
    _, _, asked = await attempt(lambda _: next(replies))
    assert [m.extra for m in asked[1].messages if m.role == "assistant"] == [{"reasoning_content": "hm"}]


async def test_every_history_that_is_sent_answers_each_call_once() -> None:
    odd = iter(
        [
            calls(("look", {}), ("lok", {})),
            text(""),
            text("hm"),
            calls(("look", {})),
            calls(("look", {})),
            calls(("write", {})),
            submit(),
        ]
    )
    world, _, _ = await attempt(lambda _: next(odd), options=settings(context_tokens=16_000))
    for request in world.requests:
        waiting: list[str] = []
        for message in request.messages:
            if message.role == "tool":
                assert message.tool_call_id == waiting.pop(0)
            else:
                assert not waiting
                waiting = [c.id for c in message.tool_calls]
        assert not waiting
    assert len(world.kinds(EventKind.TASK_SUBMITTED)) == 2


async def test_a_tool_that_calls_itself_subtask_submit_is_not_offered() -> None:
    world, submission, asked = await attempt(lambda _: submit("ours"), tools=("look", "subtask_submit"))
    assert submission.result == "ours"
    assert [t.name for t in asked[0].tools].count("subtask_submit") == 1
    assert "End this task" in next(t.description for t in asked[0].tools if t.name == "subtask_submit")
    assert not world.server.effects


async def test_a_tool_that_fails_in_the_same_words_whatever_it_is_given_is_given_up_after_four_tries() -> None:
    numbers = count()
    server = FakeServer(
        behave=lambda tool, _: Outcome(OutcomeKind.FAILED, tool, "c", "tool_failed", "no such host", "yes")
    )
    world, submission, asked = await attempt(
        lambda r: submit("no host", success=False) if only_submit(r) else calls(("look", {"x": next(numbers)})),
        server=server,
    )
    assert (submission.result, sum(world.server.effects.values()), len(asked)) == ("no host", 4, 5)
    assert "fails in the same way as before" in prompt(asked[-1])


async def test_a_tool_that_fails_in_new_words_each_time_is_not_given_up() -> None:
    numbers = count()
    server = FakeServer(
        behave=lambda tool, args: Outcome(OutcomeKind.FAILED, tool, "c", "tool_failed", f"line {args['x']}", "yes")
    )
    world, _, _ = await attempt(
        lambda r: submit("last") if only_submit(r) else calls(("look", {"x": next(numbers)})), server=server
    )
    assert sum(world.server.effects.values()) == 14
