from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.llm.dialect import Dialect
from agent.llm.model import Message, Request, ToolSpec
from agent.llm.normalise import normalise
from agent.llm.stream import Completion, RawCall
from agent.llm.tool_names import sent_names, valid_name
from agent.llm.wire import payload


def test_a_name_with_other_characters_is_sent_as_a_valid_one_and_its_call_is_the_tools() -> None:
    tools = tuple(ToolSpec(name, "", {"type": "object"}) for name in ("web.search", "look", "x" * 100))
    request = Request("actor", (Message("user", "go"),), tools)
    body = payload(request, request.messages, "m", Dialect())
    sent = [tool["function"]["name"] for tool in body["tools"]]
    assert sent == ["web_search", "look", "x" * 64]
    calls = [RawCall(n, f"c{n}", name, "{}") for n, name in enumerate(sent)]
    found = normalise(Completion("", calls, "tool_calls"), request)
    assert [call.name for call in found.tool_calls] == [tool.name for tool in tools]


def test_a_call_written_as_text_may_use_either_name() -> None:
    request = Request("actor", (Message("user", "go"),), (ToolSpec("web.search", "", {"type": "object"}),))
    for name in ("web.search", "web_search"):
        found = normalise(Completion(f'```json\n{{"name": "{name}", "arguments": {{}}}}\n```', [], "stop"), request)
        assert [call.name for call in found.tool_calls] == ["web.search"]


def test_a_name_that_is_valid_is_kept_and_another_makes_way() -> None:
    assert sent_names(["a.b", "a_b", "a/b"]) == {"a_b": "a_b", "a.b": "a_b_2", "a/b": "a_b_3"}


@given(st.lists(st.text(max_size=80), max_size=12))
def test_no_two_tools_are_sent_under_one_name(names: list[str]) -> None:
    sent = sent_names(names)
    assert set(sent) == set(names)
    assert len(set(sent.values())) == len(sent)
    assert all(valid_name(name) == name for name in sent.values())
