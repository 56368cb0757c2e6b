"""What a scripted model says, and its form on the wire: a completion, or the chunks of a stream."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from agent.llm.mock_request import Asked

DONE = b"data: [DONE]\n\n"
_PIECE_CHARS = 400
_MAX_PIECES = 500  # of a very long text


@dataclass
class Call:
    """`arguments` is a text, or any JSON value for a server that forgets to encode it. `id` None: null on the wire."""

    name: str
    arguments: Any
    id: str | None


@dataclass
class Planned:
    """One reply before it is sent. `index` says how its calls are numbered in a stream."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: str = ""
    usage: dict[str, Any] | None = None
    index: str = "proper"  # proper, missing, same, interleaved
    leave_out: frozenset[str] = frozenset()  # of usage, id, finish_reason, choices

    @property
    def reason(self) -> str:
        return self.finish_reason or ("tool_calls" if self.calls else "stop")


@dataclass
class Delivery:
    """What the server writes: one body, or the frames of a stream with what goes wrong on the way.

    `stall_at` None: no pause; -1: before the headers; n: before frame n. `cut_at`: the stream ends before this frame,
    cleanly, or with a dropped connection when `drop` is set.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    frames: list[bytes] = field(default_factory=list)
    stall_at: int | None = None
    stall_s: float = 0.0
    cut_at: int | None = None
    drop: bool = False


def error(status: int, message: str, code: str, **headers: str) -> Delivery:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return Delivery(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(body).encode()
    )


def deliver(planned: Planned, asked: Asked, model: str) -> Delivery:
    """`planned` as JSON, or as server-sent events when the request asks for a stream."""
    if not asked.stream:
        return Delivery(body=_dump(_completion(planned, asked, model)))
    return Delivery(frames=[*(frame(chunk) for chunk in _chunks(planned, asked, model)), DONE])


def frame(chunk: Any) -> bytes:
    return b"data: " + _dump(chunk) + b"\n\n"


def _completion(planned: Planned, asked: Asked, model: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": planned.text or None}
    if planned.calls:
        message["tool_calls"] = [_call(call, planned) for call in planned.calls]
    if planned.reasoning:
        message["reasoning_content"] = planned.reasoning
    choice = {"index": 0, "message": message, "finish_reason": planned.reason, "logprobs": None}
    return {
        **_head(asked, model, "chat.completion"),
        "choices": [] if "choices" in planned.leave_out else [choice],
        **({} if "usage" in planned.leave_out else {"usage": _usage(planned, asked)}),
    }


def _chunks(planned: Planned, asked: Asked, model: str) -> list[dict[str, Any]]:
    head = _head(asked, model, "chat.completion.chunk")
    if "choices" in planned.leave_out:
        return [{**head, "choices": []}]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in _pieces(planned.reasoning)]
    deltas += [
        {"content": piece} for piece in _pieces(planned.text, max(_PIECE_CHARS, len(planned.text) // _MAX_PIECES))
    ]
    deltas += _call_deltas(planned)
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    if "finish_reason" not in planned.leave_out:
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": planned.reason}]})
    if asked.include_usage and "usage" not in planned.leave_out:
        chunks.append({**head, "choices": [], "usage": _usage(planned, asked)})
    return chunks


def _call_deltas(planned: Planned) -> list[dict[str, Any]]:
    """Each call's opening, then its arguments in pieces; in turns when the calls are interleaved."""
    streams: list[list[dict[str, Any]]] = []
    for position, call in enumerate(planned.calls):
        index = {} if planned.index == "missing" else {"index": 0 if planned.index == "same" else position}
        opening = _call(call, planned)
        if not isinstance(call.arguments, str):
            streams.append([{**index, **opening}])
            continue
        opening["function"]["arguments"] = ""
        pieces = _pieces(call.arguments, max(len(call.arguments) // 3, 1))
        streams.append([{**index, **opening}, *({**index, "function": {"arguments": piece}} for piece in pieces)])
    if planned.index == "interleaved":
        longest = max((len(stream) for stream in streams), default=0)
        return [{"tool_calls": [stream[n]]} for n in range(longest) for stream in streams if n < len(stream)]
    return [{"tool_calls": [fragment]} for stream in streams for fragment in stream]


def _call(call: Call, planned: Planned) -> dict[str, Any]:
    identity = {} if "id" in planned.leave_out else {"id": call.id}
    return {**identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(asked: Asked, model: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{asked.fingerprint[:20]}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model or model,
    }


def _usage(planned: Planned, asked: Asked) -> dict[str, Any]:
    """Four characters a token, as a plausible count."""
    if planned.usage is not None:
        return planned.usage
    prompt = len(json.dumps([asked.messages, asked.tools])) // 4
    said = len(planned.text) + len(planned.reasoning) + sum(len(str(call.arguments)) for call in planned.calls)
    completion = said // 4 + 1
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _pieces(text: str, size: int = _PIECE_CHARS) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
