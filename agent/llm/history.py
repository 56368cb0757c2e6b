"""The linter of what is sent: whatever the loops, compaction or a crash left behind, no invalid conversation leaves.

Providers refuse a call without exactly one answer right after it, an answer without its call, two calls with one id, an
empty assistant message, a system message after the start, a function name with other characters than `A-Z a-z 0-9 _ -`,
and some of them arguments that are no JSON object. Each is mended here, and each mend is named.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent.llm.model import Message, ToolCall
from agent.llm.normalise import CALL_EXTRAS
from agent.llm.stream import is_object
from agent.llm.tool_names import valid_name

LOST = "The result of this call was lost. Whether it ran is not known: check before you repeat it."
GO_ON = "Go on."
_RAW_CHARS = 2000


@dataclass(frozen=True)
class Linted:
    """A conversation that every provider takes, and what had to be mended."""

    messages: tuple[Message, ...]
    mends: tuple[str, ...] = ()


def lint(messages: Sequence[Message]) -> Linted:
    """Idempotent: a linted conversation is returned as it is, without mends."""
    mends: list[str] = []
    answered = _answer_all(_unique_ids(_split_system(messages, mends), mends), mends)
    kept = [message for message in answered if _says_something(message, mends)]
    if not any(message.role == "user" for message in kept) or kept[-1].role in ("assistant", "system"):
        mends.append("a user message was added at the end")
        kept.append(Message("user", GO_ON))
    return Linted(tuple(kept), tuple(mends))


def _split_system(messages: Sequence[Message], mends: list[str]) -> list[Message]:
    """System messages at the start become one; later ones are said by the user."""
    head = 0
    while head < len(messages) and messages[head].role == "system":
        head += 1
    rest: list[Message] = []
    for message in messages[head:]:
        if message.role == "system":
            mends.append("a late system message was made a user message")
            rest.append(replace(message, role="user"))
        else:
            rest.append(message)
    texts = [message.content for message in messages[:head] if message.content.strip()]
    if head > 1:
        mends.append("system messages were joined")
    return [Message("system", "\n\n".join(texts)), *rest] if texts else rest


def _unique_ids(messages: list[Message], mends: list[str]) -> list[Message]:
    """Rename calls whose id stood before, and the answers that follow them; make names and arguments valid."""
    used: set[str] = set()
    current: dict[str, list[str]] = {}  # an id as it was → what it is now called; several for one message's duplicates
    out: list[Message] = []
    for message in messages:
        if message.role == "assistant" and message.tool_calls:
            current = {}
            calls = []
            for call in message.tool_calls:
                id_ = _free_id(call.id, used)
                if id_ != call.id:
                    mends.append("a call id was not unique")
                used.add(id_)
                current.setdefault(call.id, []).append(id_)
                calls.append(_valid_call(replace(call, id=id_), mends))
            out.append(replace(message, tool_calls=tuple(calls), extra=_renamed_extras(message, calls)))
        elif message.role == "tool" and message.tool_call_id in current:
            ids = current[message.tool_call_id]
            # Answers to duplicates come in the order of the calls; one that is left over keeps the last id.
            out.append(replace(message, tool_call_id=ids.pop(0) if len(ids) > 1 else ids[0]))
        else:
            out.append(message)
    return out


def _renamed_extras(message: Message, calls: list[ToolCall]) -> dict[str, object]:
    extras = message.extra.get(CALL_EXTRAS)
    if not isinstance(extras, dict):
        return message.extra
    pairs = zip(message.tool_calls, calls, strict=True)
    return {**message.extra, CALL_EXTRAS: {new.id: extras[old.id] for old, new in pairs if old.id in extras}}


def _free_id(wanted: str, used: set[str]) -> str:
    id_, number = wanted or "call", 2
    while id_ in used:
        id_ = f"{wanted or 'call'}_{number}"
        number += 1
    return id_


def _valid_call(call: ToolCall, mends: list[str]) -> ToolCall:
    name = valid_name(call.name)
    if name != call.name:
        mends.append("a tool name had characters that providers refuse")
    arguments = call.arguments
    if not arguments.strip():
        arguments = "{}"
    elif not is_object(arguments):
        # Servers that parse the arguments of past calls fail on these; the model still sees what it wrote.
        mends.append("arguments of a past call were no JSON object")
        arguments = json.dumps({"not_valid_json": arguments[:_RAW_CHARS]})
    return replace(call, name=name, arguments=arguments)


def _answer_all(messages: list[Message], mends: list[str]) -> list[Message]:
    """Each call is answered once, right after its message; what stood between comes after the answers."""
    out: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if message.role == "tool":
            mends.append("an answer without its call was dropped")
            continue
        if message.role != "assistant" or not message.tool_calls:
            out.append(message)
            continue
        until = position
        while until < len(messages) and messages[until].role != "assistant":
            until += 1
        following = messages[position:until]
        position = until
        out.append(message)
        out += _answers(message, [m for m in following if m.role == "tool"], mends)
        between = [m for m in following if m.role != "tool"]
        out += between
    return out


def _answers(message: Message, given: list[Message], mends: list[str]) -> list[Message]:
    by_id: dict[str | None, Message] = {}
    wanted = {call.id for call in message.tool_calls}
    for answer in given:
        if answer.tool_call_id not in wanted or answer.tool_call_id in by_id:
            mends.append("an answer without its call was dropped")
        else:
            by_id[answer.tool_call_id] = answer
    answers = []
    for call in message.tool_calls:
        if call.id not in by_id:
            mends.append("a call without an answer was answered as lost")
        answers.append(by_id.get(call.id) or Message("tool", LOST, tool_call_id=call.id))
    return answers


def _says_something(message: Message, mends: list[str]) -> bool:
    """Whether a message may stay: empty ones of user and assistant are refused by several providers."""
    if message.role in ("tool", "system") or message.tool_calls or message.content.strip():
        return True
    mends.append(f"an empty {message.role} message was dropped")
    return False
