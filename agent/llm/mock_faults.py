"""How a scripted server fails: answers in place of a reply, and replies that do not arrive whole."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.utils import formatdate

from agent.llm.mock_quirks import Quirk
from agent.llm.mock_reply import DONE, Delivery, error, frame
from agent.llm.mock_request import Asked, content_text

_HTML = b"<!DOCTYPE html><html><head><title>Gateway</title></head><body><h1>It works!</h1></body></html>"

# Refusals: None lets the request pass.


def _rate_limited(quirk: Quirk, _asked: Asked) -> Delivery:
    after = quirk.retry_after
    if after == "date":
        after = formatdate(time.time() + quirk.seconds, usegmt=True)
    return error(
        429, "Rate limit reached", "rate_limit_exceeded", **({"retry_after": after} if after is not None else {})
    )


def _server_error(quirk: Quirk, _asked: Asked) -> Delivery:
    return error(quirk.status, "The server had an error while processing your request", "server_error")


def _unauthorized(_quirk: Quirk, asked: Asked) -> Delivery:
    return error(401, f"Incorrect API key provided: {asked.key}", "invalid_api_key")


def _forbidden(_quirk: Quirk, _asked: Asked) -> Delivery:
    return error(403, "Project does not have access to the model", "model_not_found")


def _bad_request(_quirk: Quirk, _asked: Asked) -> Delivery:
    return error(400, "Invalid value: 'messages[0]'", "invalid_value")


def _unprocessable(_quirk: Quirk, _asked: Asked) -> Delivery:
    body = {"detail": [{"loc": ["body", "messages"], "msg": "field required", "type": "value_error"}]}
    return Delivery(422, body=json.dumps(body).encode())


def _content_filter(_quirk: Quirk, _asked: Asked) -> Delivery:
    return error(400, "The response was filtered due to the prompt", "content_filter")


def _too_long(quirk: Quirk, asked: Asked) -> bool:
    return sum(len(content_text(message)) for message in asked.messages) > quirk.chars


def _overflow_openai(quirk: Quirk, asked: Asked) -> Delivery | None:
    text = "This model's maximum context length is 8192 tokens. Please reduce the length of the messages."
    return error(400, text, "context_length_exceeded") if _too_long(quirk, asked) else None


def _overflow_llamacpp(quirk: Quirk, asked: Asked) -> Delivery | None:
    if not _too_long(quirk, asked):
        return None
    text = "request (9001 tokens) exceeds the available context size (8192 tokens), try increasing it"
    body = {"error": {"code": 400, "message": text, "type": "exceed_context_size_error"}}
    return Delivery(400, body=json.dumps(body).encode())


def _deterministic_500(_quirk: Quirk, _asked: Asked) -> Delivery:
    text = "The model produced output that does not match the expected peg-native format"
    return Delivery(500, body=json.dumps({"error": {"code": 500, "message": text, "type": "server_error"}}).encode())


def _reasoning_must_return(_quirk: Quirk, asked: Asked) -> Delivery | None:
    """DeepSeek's rule: an assistant message with calls must bring back the reasoning it came with."""
    for message in asked.messages:
        if message.get("role") == "assistant" and message.get("tool_calls") and not message.get("reasoning_content"):
            text = "The `reasoning_content` in the thinking mode must be passed back to the API."
            return error(400, text, "invalid_request_error")
    return None


def _refuses_field(field: str, text: str) -> Callable[[Quirk, Asked], Delivery | None]:
    def refuse(_quirk: Quirk, asked: Asked) -> Delivery | None:
        return error(400, text, "unsupported_parameter") if asked.body.get(field) else None

    return refuse


def _html(_quirk: Quirk, _asked: Asked) -> Delivery:
    return Delivery(headers={"Content-Type": "text/html; charset=utf-8"}, body=_HTML)


def _never_answers(quirk: Quirk, _asked: Asked) -> Delivery:
    return Delivery(stall_at=-1, stall_s=quirk.seconds, cut_at=0, drop=True)


# Damages.


def _stall(quirk: Quirk, delivery: Delivery) -> None:
    delivery.stall_at, delivery.stall_s = (quirk.after if delivery.frames else -1), quirk.seconds


def _stall_after_headers(quirk: Quirk, delivery: Delivery) -> None:
    delivery.stall_at, delivery.stall_s = 0, quirk.seconds


def _cut_stream(quirk: Quirk, delivery: Delivery) -> None:
    delivery.cut_at = quirk.after


def _dropped_connection(quirk: Quirk, delivery: Delivery) -> None:
    delivery.cut_at, delivery.drop = quirk.after, True


def _corrupt_chunk(quirk: Quirk, delivery: Delivery) -> None:
    if delivery.frames:
        delivery.frames.insert(quirk.after, b'data: {"id": "chatcmpl-1", "choices": [{"del\n\n')
    else:
        delivery.body = (delivery.body or b"")[:-20]


def _invalid_utf8(quirk: Quirk, delivery: Delivery) -> None:
    bad = b'{"choices": [{"index": 0, "delta": {"content": "\xff\xfe\xc3"}}]}'
    if delivery.frames:
        delivery.frames.insert(quirk.after, b"data: " + bad + b"\n\n")
    else:
        delivery.body = bad


def _error_in_stream(quirk: Quirk, delivery: Delivery) -> None:
    chunk = frame({"error": {"message": "The engine is overloaded", "type": "server_error", "code": "overloaded"}})
    delivery.frames[quirk.after :] = [chunk, DONE]


REFUSALS: dict[str, Callable[[Quirk, Asked], Delivery | None]] = {
    "rate_limited": _rate_limited,
    "server_error": _server_error,
    "unauthorized": _unauthorized,
    "forbidden": _forbidden,
    "bad_request": _bad_request,
    "unprocessable": _unprocessable,
    "content_filter": _content_filter,
    "overflow_openai": _overflow_openai,
    "overflow_llamacpp": _overflow_llamacpp,
    "deterministic_500": _deterministic_500,
    "reasoning_must_return": _reasoning_must_return,
    "refuses_stream_options": _refuses_field("stream_options", "Unknown parameter: 'stream_options'"),
    "refuses_streaming": _refuses_field("stream", "Streaming is not supported by this server"),
    "refuses_max_tokens": _refuses_field(
        "max_tokens", "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    ),
    "refuses_temperature": _refuses_field(
        "temperature", "Unsupported value: 'temperature' does not support this value"
    ),
    "html": _html,
    "never_answers": _never_answers,
}
DAMAGES: dict[str, Callable[[Quirk, Delivery], None]] = {
    "stall": _stall,
    "stall_after_headers": _stall_after_headers,
    "cut_stream": _cut_stream,
    "dropped_connection": _dropped_connection,
    "corrupt_chunk": _corrupt_chunk,
    "invalid_utf8": _invalid_utf8,
    "error_in_stream": _error_in_stream,
}
