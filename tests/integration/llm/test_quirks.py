"""Each quirk of real servers and models, over real HTTP, against our client."""

import json
import logging
from typing import Any

import pytest

from agent.llm.mock_server import MockServer
from agent.llm.model import FailureKind, LLMFailure, Message, Reply, Request
from tests.integration.llm.conftest import ASK, KEY, MakeModel, Serve


async def ask(model: Any, request: Request = ASK) -> Reply:
    reply: Reply = await model.complete(request, deadline_s=30)
    return reply


async def failure(model: Any, request: Request = ASK) -> LLMFailure:
    with pytest.raises(LLMFailure) as caught:
        await ask(model, request)
    assert KEY not in caught.value.message
    return caught.value


def follow_up(reply: Reply) -> Request:
    said = Message("assistant", reply.text, reply.tool_calls, extra=reply.extra)
    answers = (Message("tool", "1", tool_call_id=call.id) for call in reply.tool_calls)
    return Request("actor", (*ASK.messages, said, *answers), ASK.tools)


@pytest.fixture(params=["streamed", "whole"])
def whole(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Quirks that hold for both forms are tried in both: a server that refuses streaming gets whole requests."""
    return () if request.param == "streamed" else ("refuses_streaming",)


async def test_a_plain_reply_with_a_call(serve: Serve, model: MakeModel, whole: tuple[str, ...]) -> None:
    server = serve(*whole)
    reply = await ask(model(server))
    assert reply.text == "I run it."
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [
        ("python_execute", {"code": "print(1)"})
    ]
    assert (reply.finish_reason, reply.attempts, reply.usage.estimated) == ("tool_calls", 1, False)
    assert server.requests[-1].role == "actor"
    assert server.requests[-1].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    "quirk",
    [
        "object_arguments",
        "null_id",
        "missing_id",
        "stop_with_calls",
        "text_call",
        "fenced_call",
        "no_usage",
        "wrong_usage",
    ],
)
async def test_a_call_survives(serve: Serve, model: MakeModel, whole: tuple[str, ...], quirk: str) -> None:
    reply = await ask(model(serve(quirk, *whole)))
    assert [(call.name, json.loads(call.arguments)) for call in reply.tool_calls] == [
        ("python_execute", {"code": "print(1)"})
    ]
    assert reply.finish_reason == "tool_calls"
    assert reply.tool_calls[0].id
    assert reply.usage.estimated is (quirk in ("no_usage", "wrong_usage"))
    assert reply.usage.prompt_tokens > 0


@pytest.mark.parametrize("quirk", ["parallel_calls", "duplicate_ids", "missing_index", "same_index", "interleaved"])
async def test_no_parallel_call_is_lost(serve: Serve, model: MakeModel, whole: tuple[str, ...], quirk: str) -> None:
    reply = await ask(model(serve(quirk, *whole)))
    assert len({call.id for call in reply.tool_calls}) == 3
    assert [json.loads(call.arguments)["code"] for call in reply.tool_calls] == [
        f"print(1) # call {n}" for n in range(3)
    ]


@pytest.mark.parametrize("quirk", ["broken_json", "wrong_types"])
async def test_wrong_arguments_are_handed_on_as_they_came(serve: Serve, model: MakeModel, quirk: str) -> None:
    reply = await ask(model(serve({"name": quirk, "turns": 1})))
    assert json.dumps({"code": "print(1)"}) != reply.tool_calls[0].arguments
    again = await ask(model(serve({"name": quirk, "turns": 1})), follow_up(reply))
    assert json.loads(again.tool_calls[0].arguments) == {"code": "print(1)"}


async def test_cut_arguments_are_no_call(serve: Serve, model: MakeModel, whole: tuple[str, ...]) -> None:
    reply = await ask(model(serve("cut_arguments", *whole)))
    assert (reply.tool_calls, reply.finish_reason, reply.text) == ((), "length", "I run it.")
    assert "cut" in reply.notes[0]


async def test_an_empty_reply_is_flagged(serve: Serve, model: MakeModel, whole: tuple[str, ...]) -> None:
    reply = await ask(model(serve("empty", *whole)))
    assert reply.empty
    assert reply.notes == ("the reply is empty",)


async def test_models_that_repeat_or_invent_calls_are_passed_on(serve: Serve, model: MakeModel) -> None:
    for quirk, expected in (("same_call", 1), ("new_arguments", 2), ("invented_tool", 2)):
        asker = model(serve(quirk))
        first = await ask(asker)
        second = await ask(asker, follow_up(first))
        assert len({(r.tool_calls[0].name, r.tool_calls[0].arguments) for r in (first, second)}) == expected


async def test_reasoning_is_carried_back(serve: Serve, model: MakeModel, whole: tuple[str, ...]) -> None:
    asker = model(serve("reasoning", "reasoning_must_return", *whole))
    reply = await ask(asker)
    assert reply.extra["reasoning_content"] == "Let me think about this step by step."
    assert (await ask(asker, follow_up(reply))).tool_calls
    bare = Request(
        "actor", tuple(Message(m.role, m.content, m.tool_calls, m.tool_call_id) for m in follow_up(reply).messages)
    )
    assert (await failure(asker, bare)).kind is FailureKind.REFUSED


@pytest.mark.parametrize("quirk", ["overflow_openai", "overflow_llamacpp"])
async def test_overflow_in_both_dialects(serve: Serve, model: MakeModel, whole: tuple[str, ...], quirk: str) -> None:
    server = serve({"name": quirk, "chars": 5000}, *whole)
    asker = model(server)
    await ask(asker)
    sent = len(server.requests)
    long = Request("actor", (*ASK.messages, Message("user", "x" * 6000)))
    failed = await failure(asker, long)
    assert (failed.kind, failed.attempts, len(server.requests) - sent) == (FailureKind.OVERFLOW, 1, 1)


@pytest.mark.parametrize(
    ("quirk", "kind"),
    [
        ("unauthorized", FailureKind.REFUSED), ("forbidden", FailureKind.REFUSED), ("bad_request", FailureKind.REFUSED),
        ("unprocessable", FailureKind.REFUSED), ("content_filter", FailureKind.FILTERED), ("deterministic_500", FailureKind.INCOMPLETE),
        ("html", FailureKind.REFUSED), ("filtered_reply", FailureKind.FILTERED),
    ],
)  # fmt: skip
async def test_what_would_fail_again_is_asked_once(
    serve: Serve, model: MakeModel, quirk: str, kind: FailureKind
) -> None:
    server = serve(quirk)
    failed = await failure(model(server))
    assert (failed.kind, failed.attempts, len(server.requests)) == (kind, 1, 1)


@pytest.mark.parametrize(
    "quirk",
    [
        {"name": "rate_limited", "retry_after": "0"}, {"name": "rate_limited", "retry_after": "garbage"}, "rate_limited", "server_error",
        {"name": "server_error", "status": 503}, {"name": "server_error", "status": 408}, {"name": "server_error", "status": 409},
        "cut_stream", "dropped_connection", {"name": "dropped_connection", "after": 0}, "corrupt_chunk", "invalid_utf8",
        "no_finish_reason", "empty_choices", "error_in_stream",
    ],
    ids=str,
)  # fmt: skip
async def test_what_may_pass_is_asked_again(serve: Serve, model: MakeModel, quirk: Any) -> None:
    once = {**({"name": quirk} if isinstance(quirk, str) else quirk), "sends": 1}
    server = serve(once)
    reply = await ask(model(server))
    assert (reply.attempts, len(server.requests)) == (2, 2)
    assert len(reply.tool_calls) == 1


@pytest.mark.parametrize(
    ("quirk", "kind"),
    [
        ("cut_stream", FailureKind.INCOMPLETE), ("no_finish_reason", FailureKind.INCOMPLETE), ("corrupt_chunk", FailureKind.INCOMPLETE),
        ("invalid_utf8", FailureKind.INCOMPLETE), ("empty_choices", FailureKind.INCOMPLETE), ("dropped_connection", FailureKind.INCOMPLETE),
        ({"name": "dropped_connection", "after": 0}, FailureKind.UNREACHABLE), ("server_error", FailureKind.UNREACHABLE),
        ("rate_limited", FailureKind.UNREACHABLE), ({"name": "rate_limited", "retry_after": "3600"}, FailureKind.RATE_LIMITED),
        ({"name": "rate_limited", "retry_after": "date", "seconds": 3600}, FailureKind.RATE_LIMITED),
    ],
    ids=str,
)  # fmt: skip
async def test_a_fault_that_stays_ends_in_its_kind_and_never_in_half_a_reply(
    serve: Serve, model: MakeModel, quirk: Any, kind: FailureKind
) -> None:
    server = serve(quirk)
    failed = await failure(model(server))
    attempts = 1 if kind is FailureKind.RATE_LIMITED else 4
    assert (failed.kind, failed.attempts, len(server.requests)) == (kind, attempts, attempts)
    assert (failed.usage is not None and failed.usage.estimated) is (kind is FailureKind.INCOMPLETE)


@pytest.mark.parametrize("quirk", ["corrupt_chunk", "invalid_utf8", "empty_choices", "no_finish_reason"])
async def test_the_same_without_streaming(serve: Serve, model: MakeModel, quirk: str) -> None:
    if quirk == "no_finish_reason":
        replies = [{"text": "half", "finish_reason": "error"}]
        server = serve("refuses_streaming", replies=replies)
    else:
        server = serve("refuses_streaming", quirk)
    assert (await failure(model(server))).kind is FailureKind.INCOMPLETE


@pytest.mark.parametrize(
    "quirk", ["refuses_stream_options", "refuses_streaming", "refuses_max_tokens", "refuses_temperature"]
)
async def test_a_refused_field_is_left_out_at_once_and_remembered(serve: Serve, model: MakeModel, quirk: str) -> None:
    server = serve(quirk)
    asker = model(server)
    request = Request("actor", ASK.messages, ASK.tools, temperature=0.2)
    first = await ask(asker, request)
    assert (first.attempts, len(server.requests)) == (1, 2)
    assert first.tool_calls
    await ask(asker, request)
    assert len(server.requests) == 3
    assert first.usage.estimated is (quirk == "refuses_stream_options")


async def test_all_refusals_of_fields_together_end_in_a_reply(serve: Serve, model: MakeModel) -> None:
    server = serve("refuses_stream_options", "refuses_streaming", "refuses_max_tokens", "refuses_temperature")
    reply = await ask(model(server), Request("actor", ASK.messages, ASK.tools, temperature=0.2))
    assert reply.tool_calls
    assert len(server.requests) == 5


async def test_two_megabytes_of_text_arrive_whole(serve: Serve, model: MakeModel) -> None:
    reply = await ask(model(serve("huge_text")))
    assert len(reply.text) == 2_000_000


async def test_more_than_the_bound_is_a_failure(serve: Serve, model: MakeModel) -> None:
    server = serve({"name": "huge_text", "chars": 5_000_000})
    failed = await failure(model(server))
    assert (failed.kind, failed.attempts) == (FailureKind.INCOMPLETE, 1)


async def test_lone_surrogates_and_odd_numbers_in_the_history_do_not_break_the_request(
    serve: Serve, model: MakeModel
) -> None:
    odd = Message("assistant", "\ud800 broken", extra={"score": float("nan"), "none": None})
    assert (await ask(model(serve()), Request("actor", (*ASK.messages, odd)))).text


async def test_a_broken_history_is_mended_before_it_is_sent(serve: Serve, model: MakeModel) -> None:
    server = serve()
    reply = await ask(model(server))
    said = Message("assistant", "", reply.tool_calls)
    await ask(model(server), Request("actor", (Message("tool", "orphan", tool_call_id="x"), *ASK.messages, said, said)))
    roles = [message["role"] for message in server.requests[-1].body["messages"]]
    assert roles[-4:] == ["assistant", "tool", "assistant", "tool"]
    assert "orphan" not in json.dumps(server.requests[-1].body)


@pytest.mark.parametrize("seed", range(3))
async def test_pure_noise_gives_replies_or_failures_and_nothing_else(serve: Serve, model: MakeModel, seed: int) -> None:
    asker = model(serve({"name": "noise", "seed": seed}))
    request = ASK
    for _ in range(15):
        reply = await ask(asker, request)
        assert all(call.id and call.name and isinstance(call.arguments, str) for call in reply.tool_calls)
        said = Message("assistant", reply.text, reply.tool_calls, extra=reply.extra)
        answers = tuple(Message("tool", "?", tool_call_id=call.id) for call in reply.tool_calls)
        request = Request("actor", (*request.messages, said, *answers, Message("user", "go on")), ASK.tools)


async def test_the_key_is_in_no_message_and_no_log(
    serve: Serve, model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failed = await failure(model(serve("unauthorized")))
    assert "[redacted]" in failed.message
    assert KEY not in caplog.text
    assert KEY not in repr(failed)


async def test_the_mock_says_loudly_what_it_does_not_foresee(serve: Serve, model: MakeModel) -> None:
    server: MockServer = serve(replies=[{"text": "{{tool:/total=(.*)/}}"}])
    failed = await failure(model(server))
    assert (failed.kind, failed.attempts) == (FailureKind.REFUSED, 1)
    assert "mock script" in failed.message
    assert "add up" in failed.message
