"""What a tool asks its user in the midst of a call, in both eras of MCP: a question out of foreign words, and the answer's words."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from toolserver.catalog.schema import schema_problem
from toolserver.sandbox.stdio_client import INVALID_PARAMS, METHOD_NOT_FOUND, RpcError

ELICIT = "elicitation/create"
MAX_MESSAGE_CHARS, MAX_SCHEMA_BYTES, MAX_URL_CHARS = 8_000, 64 << 10, 4_000
MAX_QUESTIONS = 16  # in one answer of a tool
Action = Literal["accept", "decline", "cancel"]


@dataclass(frozen=True)
class Question:
    """`requested_schema` is that of the content of an answer that accepts; in mode `url` there is none, but a page to open."""

    message: str
    mode: Literal["form", "url"]
    requested_schema: dict[str, Any] | None
    url: str | None = None

    @classmethod
    def read(cls, params: dict[str, Any]) -> Question:
        """Of the params of `elicitation/create`. Raises RpcError."""
        message, mode = params.get("message"), params.get("mode", "form")
        if not isinstance(message, str) or mode not in ("form", "url"):
            raise RpcError(INVALID_PARAMS, "An elicitation needs a message, and the mode form or url.")
        message = message[:MAX_MESSAGE_CHARS]
        if mode == "url":
            url = params.get("url")
            if not isinstance(url, str) or len(url) > MAX_URL_CHARS or not url.startswith(("https://", "http://")):
                raise RpcError(INVALID_PARAMS, "An elicitation of the mode url needs a url of http or https.")
            return cls(message, "url", None, url)
        schema = params.get("requestedSchema")
        problem = schema_problem(schema)
        if problem is None and len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
            problem = f"it is longer than {MAX_SCHEMA_BYTES} bytes"
        if problem is not None:
            raise RpcError(INVALID_PARAMS, f"The requestedSchema can't be used: {problem}.")
        return cls(message, "form", schema)

    def as_json(self) -> dict[str, Any]:
        told: dict[str, Any] = {"message": self.message, "mode": self.mode}
        return {**told, **({"url": self.url} if self.mode == "url" else {"requested_schema": self.requested_schema})}


@dataclass(frozen=True)
class Reply:
    action: Action
    content: dict[str, Any] | None = None

    def as_result(self) -> dict[str, Any]:
        """The ElicitResult."""
        shown = {"content": self.content} if self.action == "accept" and self.content is not None else {}
        return {"action": self.action, **shown}


Ask = Callable[[Question], Awaitable[Reply]]


async def answers_to(requests: Any, ask: Ask) -> dict[str, Any]:
    """The `inputResponses` to the `inputRequests` of a result, one question after the other. Raises RpcError."""
    if not isinstance(requests, dict) or len(requests) > MAX_QUESTIONS:
        raise RpcError(INVALID_PARAMS, f"the tool's inputRequests are no object of at most {MAX_QUESTIONS} requests")
    questions = {name: _question(request) for name, request in requests.items()}
    return {name: (await ask(question)).as_result() for name, question in questions.items()}


def _question(request: Any) -> Question:
    method = request.get("method") if isinstance(request, dict) else None
    params = request.get("params") if isinstance(request, dict) else None
    if method != ELICIT:
        raise RpcError(
            METHOD_NOT_FOUND, f"the tool wants {str(method)[:60]!r} of its client, which this one does not do"
        )
    return Question.read(params if isinstance(params, dict) else {})
