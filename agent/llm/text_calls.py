"""Calls that a model wrote as text, because its server or chat template knows no tool calls.

Only known notations are read; anything else stays text. A notation with its own marks is a call whatever its name says
(an unknown tool is answered as such), plain JSON only when a tool of that name is offered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from agent.llm.json_ladder import JsonProblem, parse_json

_MAX_SCANNED = 1_000_000
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class TextCall:
    """`start` and `end` say where in the text it stood."""

    name: str
    arguments: str
    start: int
    end: int


def find_calls(text: str, tool_names: Collection[str]) -> tuple[list[TextCall], str]:
    """The calls in `text`, and the text without them. No tools offered: no calls."""
    if not tool_names or not text or len(text) > _MAX_SCANNED:
        return [], text
    # Closed thoughts are not read, but keep their length, so that the places of what follows stay true.
    thought_until = _after_last("</think>", text)
    visible = _THOUGHT.sub(lambda match: " " * len(match.group()), text[:thought_until]) + text[thought_until:]
    for notation in _NOTATIONS:
        calls = list(notation(visible, tool_names))
        if calls:
            return calls, _without(text, calls)
    return [], text


def _after_last(mark: str, text: str) -> int:
    """Where the last `mark` ends, 0 without one."""
    place = text.rfind(mark)
    return 0 if place < 0 else place + len(mark)


def _closed(pattern: re.Pattern[str], text: str, mark: str) -> Iterator[re.Match[str]]:
    """Matches that end with `mark`. Without what follows the last one, no opening mark is searched to the end in vain."""
    return pattern.finditer(text, 0, _after_last(mark, text))


def _without(text: str, calls: list[TextCall]) -> str:
    kept, position = [], 0
    for call in calls:
        kept.append(text[position : call.start])
        position = max(position, call.end)
    kept.append(text[position:])
    return "".join(kept).strip()


def _json_call(body: str, start: int, end: int, offered: Collection[str] | None) -> Iterator[TextCall]:
    """`{"name":…, "arguments":{…}}`, or a list of them. `offered` None: any name will do."""
    parsed = parse_json(body)
    if isinstance(parsed, JsonProblem):
        return
    for item in parsed.value if isinstance(parsed.value, list) else [parsed.value]:
        if not isinstance(item, dict):
            return
        inner = item.get("function")
        item = inner if isinstance(inner, dict) else item  # noqa: PLW2901 - the call is one level down
        arguments = next((item[key] for key in ("arguments", "parameters", "args", "input") if key in item), None)
        name = item.get("name") or item.get("tool") or (inner if isinstance(inner, str) else None)
        if not isinstance(name, str) or not isinstance(arguments, dict | str):
            return
        if offered is not None and name not in offered:
            return
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield TextCall(name, text, start, end)


# Hermes, Qwen: <tool_call>{…}</tool_call>; also <function_call>, <tool_use>. A last one may lack its closing mark.
_TAGGED = re.compile(
    r"<(tool_call|function_call|tool_use)>\s*((?:```(?:json)?\s*)?[\[{].*?)(?:</\1>|<\|im_end\|>|\Z)",
    re.DOTALL,
)


def _tagged(text: str, _offered: Collection[str]) -> Iterator[TextCall]:
    for match in _TAGGED.finditer(text):
        body = match.group(2).strip()
        if body.startswith("```") and not body.endswith("```"):
            body += "\n```"
        yield from _json_call(body, match.start(), match.end(), None)


# Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>; Llama: <function=name>{…}</function>
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([\w.-]{1,128})>(.*?)</function>(?:\s*</tool_call>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]{1,128})>\n?(.*?)\n?</parameter>", re.DOTALL)
# GLM: <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value></tool_call>
_GLM = re.compile(r"<tool_call>([\w.-]{1,128})\s*\n(\s*<arg_key>.*?)</tool_call>", re.DOTALL)
_GLM_ARGUMENT = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _marked_up(text: str, _offered: Collection[str]) -> Iterator[TextCall]:
    for match in _closed(_FUNCTION, text, "</function>"):
        body = match.group(2).strip()
        pairs = [m.groups() for m in _closed(_PARAMETER, body, "</parameter>")]
        if pairs or not body:
            yield TextCall(match.group(1), _from_pairs(pairs), match.start(), match.end())
        elif isinstance(parsed := parse_json(body), JsonProblem) or not isinstance(parsed.value, dict):
            return
        else:
            yield TextCall(match.group(1), json.dumps(parsed.value, ensure_ascii=False), match.start(), match.end())
    for match in _closed(_GLM, text, "</tool_call>"):
        pairs = [m.groups() for m in _closed(_GLM_ARGUMENT, match.group(2), "</arg_value>")]
        yield TextCall(match.group(1), _from_pairs(pairs), match.start(), match.end())


def _from_pairs(pairs: Sequence[Sequence[str]]) -> str:
    """Values in mark-up carry no type: what is a JSON object, list, number, true, false or null is taken as that."""
    values: dict[str, object] = {}
    for key, value in pairs:
        typed = value.strip()[:1] in ("{", "[") or re.fullmatch(r"\s*(-?\d+(\.\d+)?|true|false|null)\s*", value)
        parsed = parse_json(value) if typed else None
        values[key] = value if parsed is None or isinstance(parsed, JsonProblem) else parsed.value
    return json.dumps(values, ensure_ascii=False)


# Mistral: [TOOL_CALLS][{…}]; Llama: <|python_tag|>{…}
_PREFIXED = re.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>)\s*([\[{].*)\Z", re.DOTALL)
# DeepSeek: …begin｜>function<｜tool▁sep｜>name\n```json\n{…}\n```<｜tool▁call▁end｜>
_DEEPSEEK = re.compile(
    r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function)?(?:<｜tool▁sep｜>)?([\w.-]{1,128})\s*(?:<｜tool▁sep｜>)?"
    r"(.*?)<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
    re.DOTALL,
)
# Kimi: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
_KIMI = re.compile(
    r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>\s*(?:functions\.)?([\w-]{1,128})(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?",
    re.DOTALL,
)


def _special_tokens(text: str, _offered: Collection[str]) -> Iterator[TextCall]:
    for match in _PREFIXED.finditer(text):
        yield from _json_call(match.group(1), match.start(), match.end(), None)
    for pattern, mark in ((_DEEPSEEK, "<｜tool▁call▁end｜>"), (_KIMI, "<|tool_call_end|>")):
        for match in _closed(pattern, text, mark):
            parsed = parse_json(match.group(2))
            if not isinstance(parsed, JsonProblem) and isinstance(parsed.value, dict):
                arguments = json.dumps(parsed.value, ensure_ascii=False)
                yield TextCall(match.group(1), arguments, match.start(), match.end())


_FENCED = re.compile(r"```(?:json|tool_call|tool_code)?[ \t]*\n(\s*[\[{].*?)\n?```", re.DOTALL)


def _plain_json(text: str, offered: Collection[str]) -> Iterator[TextCall]:
    """A fenced block, or the whole text: JSON that names an offered tool."""
    whole = text.strip()
    if whole[:1] in ("{", "["):
        yield from _json_call(whole, 0, len(text), offered)
        return
    for match in _closed(_FENCED, text, "```"):
        yield from _json_call(match.group(1), match.start(), match.end(), offered)


_NOTATIONS: tuple[Callable[[str, Collection[str]], Iterator[TextCall]], ...] = (
    _tagged,
    _marked_up,
    _special_tokens,
    _plain_json,
)
