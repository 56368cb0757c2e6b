"""How a scripted model misbehaves in what it says: its calls, their ids and arguments, its texts and counts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from agent.llm.mock_quirks import Quirk
from agent.llm.mock_reply import Call, Planned
from agent.llm.mock_request import Asked

_MAX_SAMPLE_DEPTH = 5


def _own_call(planned: Planned, asked: Asked, change: str = "") -> Call:
    """The reply's first call, else a valid call of the first tool offered; `change` makes its arguments differ."""
    if planned.calls:
        call = planned.calls[0]
        name, arguments = call.name, json.loads(call.arguments)
    else:
        tool = asked.tools[0].get("function", {}) if asked.tools else {}
        name, arguments = str(tool.get("name", "no_tool")), sample(tool.get("parameters", {}), change)
    if change and isinstance(arguments, dict):
        key = next((key for key, value in arguments.items() if isinstance(value, str)), None)
        if key is not None:
            arguments[key] = f"{arguments[key]} # {change}"
    return Call(name, json.dumps(arguments), f"call_{asked.fingerprint[:12]}_0")


def sample(schema: Any, text: str = "", depth: int = 0) -> Any:
    """A small value that matches a JSON Schema of the plain kind: types, enums, required properties."""
    if not isinstance(schema, dict) or depth > _MAX_SAMPLE_DEPTH:
        return text or "x"
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {key: sample(properties.get(key, {}), text, depth + 1) for key in schema.get("required", [])}
    if kind == "array":
        return [sample(schema.get("items", {}), text, depth + 1)] * schema.get("minItems", 0)
    values = {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1.0), "boolean": True, "null": None}
    return values.get(kind, text or "x")


def _same_call(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = [_own_call(planned, asked)]


def _new_arguments(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = [_own_call(planned, asked, f"try {asked.turn}")]


def _invented_tool(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = [Call(f"invented_tool_{asked.turn}", "{}", f"call_{asked.fingerprint[:12]}_0")]


def _each_call(change: Callable[[Call], None]) -> Callable[[Quirk, Planned, Asked], None]:
    def distort(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
        planned.calls = planned.calls or [_own_call(planned, asked)]
        for call in planned.calls:
            change(call)

    return distort


def _broken_json(call: Call) -> None:
    call.arguments = '{"code": [1, 2' + str(call.arguments)[:20]


def _wrong_types(call: Call) -> None:
    wrong: dict[str, Any] = {}
    for key, value in json.loads(call.arguments).items():
        wrong[key] = 12345 if isinstance(value, str) else "not a number"
    call.arguments = json.dumps({**wrong, "unexpected": True})


def _object_arguments(call: Call) -> None:
    call.arguments = json.loads(call.arguments)


def _null_id(call: Call) -> None:
    call.id = None


def _missing_id(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = planned.calls or [_own_call(planned, asked)]
    planned.leave_out |= {"id"}


def _duplicate_ids(quirk: Quirk, planned: Planned, asked: Asked) -> None:
    _parallel_calls(quirk, planned, asked)
    for call in planned.calls:
        call.id = "call_1"


def _parallel_calls(quirk: Quirk, planned: Planned, asked: Asked) -> None:
    """Each call of its own id and arguments, so that a lost one is noticed."""
    if len(planned.calls) < quirk.count:
        planned.calls = [_own_call(planned, asked, f"call {number}") for number in range(quirk.count)]
        for number, call in enumerate(planned.calls):
            call.id = f"call_{asked.fingerprint[:12]}_{number}"


def _stop_with_calls(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = planned.calls or [_own_call(planned, asked)]
    planned.finish_reason = "stop"


def _empty(_quirk: Quirk, planned: Planned, _asked: Asked) -> None:
    planned.text, planned.calls, planned.finish_reason = "", [], "stop"


def _text_call(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    calls = planned.calls or [_own_call(planned, asked)]
    written = [json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}) for call in calls]
    planned.text += "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in written)
    planned.calls, planned.finish_reason = [], "stop"


def _fenced_call(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    call = (planned.calls or [_own_call(planned, asked)])[0]
    body = json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, indent=1)
    planned.text += f"\n```json\n{body}\n```"
    planned.calls, planned.finish_reason = [], "stop"


def _cut_arguments(_quirk: Quirk, planned: Planned, asked: Asked) -> None:
    planned.calls = planned.calls or [_own_call(planned, asked)]
    last = planned.calls[-1]
    last.arguments = last.arguments[: max(len(last.arguments) * 2 // 3, 1)]
    planned.finish_reason = "length"


def _reasoning(_quirk: Quirk, planned: Planned, _asked: Asked) -> None:
    planned.reasoning = planned.reasoning or "Let me think about this step by step."


def _huge_text(quirk: Quirk, planned: Planned, _asked: Asked) -> None:
    length = quirk.chars or 2_000_000
    planned.text = ("All work and no play makes a dull model. " * (length // 41 + 1))[:length]


def _filtered_reply(_quirk: Quirk, planned: Planned, _asked: Asked) -> None:
    planned.text, planned.calls, planned.finish_reason = "I can", [], "content_filter"


def _wrong_usage(_quirk: Quirk, planned: Planned, _asked: Asked) -> None:
    planned.usage = {"prompt_tokens": "many", "completion_tokens": None, "total_tokens": [], "prompt_tokens_details": 7}


def _indexed(index: str) -> Callable[[Quirk, Planned, Asked], None]:
    def distort(quirk: Quirk, planned: Planned, asked: Asked) -> None:
        _parallel_calls(quirk, planned, asked)
        planned.index = index

    return distort


def _without(part: str) -> Callable[[Quirk, Planned, Asked], None]:
    def distort(_quirk: Quirk, planned: Planned, _asked: Asked) -> None:
        planned.leave_out |= {part}

    return distort


def _noise(quirk: Quirk, planned: Planned, asked: Asked) -> None:
    """Whatever a bad model says, drawn from the seed and the request: the same request gets the same noise."""
    chance = random.Random(f"{quirk.seed}:{asked.fingerprint}")  # noqa: S311 - noise, not a secret
    planned.text = " ".join(chance.choice(_WORDS) for _ in range(chance.randrange(30)))
    planned.calls, planned.finish_reason = [], None
    if asked.tools and chance.random() < 0.8:
        tool = chance.choice(asked.tools).get("function", {})
        arguments = json.dumps(sample(tool.get("parameters", {}), chance.choice(_WORDS)))
        planned.calls = [Call(str(tool.get("name", "")), arguments, f"call_{chance.randrange(10**9)}")]
    if chance.random() < 0.5:
        DISTORTIONS[chance.choice(_NOISY)](quirk, planned, asked)


DISTORTIONS: dict[str, Callable[[Quirk, Planned, Asked], None]] = {
    "same_call": _same_call,
    "new_arguments": _new_arguments,
    "invented_tool": _invented_tool,
    "broken_json": _each_call(_broken_json),
    "wrong_types": _each_call(_wrong_types),
    "object_arguments": _each_call(_object_arguments),
    "null_id": _each_call(_null_id),
    "missing_id": _missing_id,
    "duplicate_ids": _duplicate_ids,
    "parallel_calls": _parallel_calls,
    "stop_with_calls": _stop_with_calls,
    "empty": _empty,
    "text_call": _text_call,
    "fenced_call": _fenced_call,
    "cut_arguments": _cut_arguments,
    "reasoning": _reasoning,
    "huge_text": _huge_text,
    "filtered_reply": _filtered_reply,
    "no_usage": _without("usage"),
    "wrong_usage": _wrong_usage,
    "missing_index": _indexed("missing"),
    "same_index": _indexed("same"),
    "interleaved": _indexed("interleaved"),
    "empty_choices": _without("choices"),
    "no_finish_reason": _without("finish_reason"),
    "noise": _noise,
}
_NOISY = (
    "invented_tool", "broken_json", "wrong_types", "object_arguments", "null_id", "duplicate_ids", "stop_with_calls", "empty",
    "text_call", "cut_arguments", "no_usage", "missing_index",
)  # fmt: skip
_WORDS = (
    "analyse",
    "the",
    "file",
    "then",
    "42",
    "maybe",
    "```",
    "{",
    "done",
    "Schritt",
    "数据",
    "error",
    "\n",
    "call",
    "☃",
)
