"""The assembler, over the ways in which servers cut and number the calls of a stream."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.llm.stream import MAX_CALLS, Assembler, RawCall, assemble, is_object


def delta(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    fragment = {**fields, **({"tool_calls": list(calls)} if calls else {})}
    return {"choices": [{"index": 0, "delta": fragment, "finish_reason": None}]}


def part(
    index: int | None = None, id_: Any = "absent", name: str | None = None, arguments: Any = None
) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    out: dict[str, Any] = {"function": function, "type": "function"}
    if index is not None:
        out["index"] = index
    if id_ != "absent":
        out["id"] = id_
    return out


def calls_of(*chunks: dict[str, Any], names: tuple[str, ...] = ("a", "b")) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in assemble(chunks, names).calls]


def test_text_and_calls_in_pieces_as_openai_sends_them() -> None:
    whole = assemble(
        [
            delta(role="assistant", content=""),
            delta(content="Let me "),
            delta(content="see."),
            delta(part(0, "c0", "a", "")),
            delta(part(0, arguments='{"x"')),
            delta(part(0, arguments=": 1}")),
            delta(part(1, "c1", "b", "")),
            delta(part(1, arguments="{}")),
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}, "model": "m-1"},
        ]
    )
    assert whole.text == "Let me see."
    assert whole.calls == [RawCall(0, "c0", "a", '{"x": 1}'), RawCall(1, "c1", "b", "{}")]
    assert (whole.finish_reason, whole.model, whole.usage["completion_tokens"]) == ("tool_calls", "m-1", 7)


X, Y = '{"x": 1}', '{"x": 2}'


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        pytest.param(
            [delta(part(None, "c0", "a", "")), delta(part(None, arguments=X)), delta(part(None, "c1", "a", Y))],
            [("c0", "a", X), ("c1", "a", Y)],
            id="no index",
        ),
        pytest.param(
            [delta(part(0, "c0", "a", X)), delta(part(0, "c1", "b", "")), delta(part(0, arguments=Y))],
            [("c0", "a", X), ("c1", "b", Y)],
            id="the same index for all",
        ),
        pytest.param(
            [delta(part(0, None, "a", X)), delta(part(0, None, "a", '{"x"')), delta(part(0, None, arguments=": 2}"))],
            [("", "a", X), ("", "a", Y)],
            id="the same index, name and no id",
        ),
        pytest.param(
            [
                delta(part(0, "c0", "a", "")), delta(part(1, "c1", "b", "")), delta(part(0, arguments='{"x"')),
                delta(part(1, arguments='{"x"')), delta(part(1, arguments=": 2}")), delta(part(0, arguments=": 1}")),
            ],
            [("c0", "a", X), ("c1", "b", Y)],
            id="interleaved by index",
        ),
        pytest.param(
            [
                delta(part(None, "c0", "a", '{"x"')), delta(part(None, "c1", "b", '{"x"')),
                delta(part(None, "c0", arguments=": 1}")), delta(part(None, "c1", arguments=": 2}")),
            ],
            [("c0", "a", X), ("c1", "b", Y)],
            id="interleaved by id",
        ),
        pytest.param(
            [delta(part(0, "c", "a", X)), delta(part(1, "c", "a", '{"x"')), delta(part(1, arguments=": 2}"))],
            [("c", "a", X), ("c", "a", Y)],
            id="one id for two calls",
        ),
        pytest.param(
            [delta(part(0, "c0", "a", '{"x"')), delta(part(0, "c9", arguments=": 1}"))],
            [("c0", "a", X)],
            id="a new id in each chunk",
        ),
        pytest.param(
            [delta(part(0, "c0", "a", '{"x"')), delta(part(0, "c0", "a", ": 1}"))],
            [("c0", "a", X)],
            id="id and name in each chunk",
        ),
        pytest.param(
            [delta(part(0, "c0", "a", {"x": 1}))],
            [("c0", "a", X)],
            id="arguments as an object",
        ),
        pytest.param(
            [delta(part(0, "c0", "a", X), part(1, "c1", "b", Y))],
            [("c0", "a", X), ("c1", "b", Y)],
            id="two calls in one chunk",
        ),
        pytest.param(
            [delta(function_call={"name": "a", "arguments": ""}), delta(function_call={"arguments": X})],
            [("", "a", X)],
            id="the old function_call",
        ),
        pytest.param(
            [delta(part(0, 7, "a", X))],
            [("7", "a", X)],
            id="a number for an id",
        ),
    ],
)  # fmt: skip
def test_a_fragment_finds_its_call(chunks: list[dict[str, Any]], expected: list[tuple[str, str, str]]) -> None:
    assert calls_of(*chunks) == expected


def test_a_name_in_pieces_is_joined_when_it_makes_an_offered_tool() -> None:
    chunks = [delta(part(0, "c0", "python_")), delta(part(0, name="execute")), delta(part(0, arguments=X))]
    assert calls_of(*chunks, names=("python_execute",)) == [("c0", "python_execute", X)]


def test_an_answer_that_was_not_streamed_is_one_chunk() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [part(None, None, "a", {"x": 1})]}
    whole = assemble([{"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}])
    assert [(call.name, call.arguments) for call in whole.calls] == [("a", X)]
    assert whole.finish_reason == "stop"


def test_provider_fields_are_joined_and_kept() -> None:
    call = {**part(0, "c0", "a", X), "extra_content": {"google": {"thought_signature": "sig"}}}
    whole = assemble(
        [
            delta(reasoning_content="First "),
            delta(reasoning_content="this.", reasoning_details=[{"n": 1}]),
            delta(call, reasoning_details=[{"n": 2}], refusal=None, unknown=None),
        ]
    )
    assert whole.extra == {"reasoning_content": "First this.", "reasoning_details": [{"n": 1}, {"n": 2}]}
    assert whole.calls[0].extra == {"extra_content": {"google": {"thought_signature": "sig"}}}


def test_content_in_parts_and_a_refusal_are_text() -> None:
    assert (
        assemble([delta(content=[{"type": "text", "text": "Hi"}, {"type": "image"}]), delta(refusal=" no")]).text
        == "Hi no"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", True),
        (' {"a": {"b": []}} ', True),
        ("", False),
        ("{", False),
        ("[1]", False),
        ("{}{}", False),
        ('{"a": "}', False),
    ],
)
def test_is_object(text: str, expected: bool) -> None:
    assert is_object(text) is expected


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(), max_size=3).map(json.dumps)
CALLS = st.lists(st.tuples(st.sampled_from(["a", "b"]), ARGUMENTS), min_size=1, max_size=4)


@given(CALLS, st.data())
def test_no_style_of_numbering_loses_or_mixes_a_call(calls: list[tuple[str, str]], data: st.DataObject) -> None:
    style = data.draw(st.sampled_from(["openai", "no index", "same index", "interleaved", "no id", "no id, no index"]))
    streams: list[list[dict[str, Any]]] = []
    for number, (name, arguments) in enumerate(calls):
        index = None if "no index" in style else 0 if style == "same index" else number
        id_ = None if "no id" in style else f"c{number}"
        cuts = sorted(data.draw(st.lists(st.integers(0, len(arguments)), max_size=4)))
        pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
        opening = part(index, id_, name, "") if data.draw(st.booleans()) else part(index, id_, name, pieces.pop(0))
        streams.append([opening, *(part(index, arguments=piece) for piece in pieces)])
    chunks: list[dict[str, Any]] = []
    if style == "interleaved":
        while any(streams):
            chunks.append(delta(data.draw(st.sampled_from([s for s in streams if s])).pop(0)))
    else:
        chunks = [delta(fragment) for stream in streams for fragment in stream]
    found = sorted((name, arguments) for _, name, arguments in calls_of(*chunks))
    assert found == sorted(calls)


GARBAGE: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.text('a{}"', max_size=3) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "tool_calls", "function", "name", "arguments", "id", "index", "content", "usage",
             "finish_reason", "model", "reasoning_content", "function_call", "text"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=25,
)  # fmt: skip


@given(st.lists(GARBAGE, max_size=5))
def test_chunks_of_any_shape_never_raise(chunks: list[Any]) -> None:
    assembler = Assembler(["a"])
    for chunk in chunks:
        assembler.feed(chunk)
        assembler.feed({"choices": [{"delta": chunk}]})
        assembler.feed({"choices": [{"delta": {"tool_calls": chunk}}]})
    whole = assembler.completion()
    assert isinstance(whole.text, str)
    assert all(isinstance(call.arguments, str) and isinstance(call.name, str) for call in whole.calls)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_flood_of_calls_is_read_up_to_a_bound_and_told(at_once: bool) -> None:
    flood = [{"index": n, "id": f"c{n}", "function": {"name": "look", "arguments": "{}"}} for n in range(100_000)]
    assembler = Assembler(["look"])
    for delta in [flood] if at_once else [[call] for call in flood]:
        assembler.feed({"choices": [{"delta": {"tool_calls": delta}, "finish_reason": "tool_calls"}]})
    assert assembler.too_many_calls
    assert len(assembler.completion().calls) == MAX_CALLS
