"""What a language model is to the rest of the agent: messages in, a complete reply out, or an LLMFailure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call the model asked for. `arguments` is what the model wrote, as text: nothing is repaired here."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message. `tool_calls` only for assistant, `tool_call_id` only for tool. `extra` holds provider fields to echo (reasoning_content)."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the model sees it; `parameters` is a JSON Schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """Tokens of one request. `cached_tokens` are part of `prompt_tokens`, `reasoning_tokens` of `completion_tokens`.

    `estimated` is true when the server sent no usage and these are our own counts.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    estimated: bool = False

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Request:
    """One question. `tool_choice`: auto, none or required. `max_tokens` bounds the reply."""

    role: str  # actor, plan_generator, ...: for logs, per-role models and scripts
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    max_tokens: int = 4096
    temperature: float | None = None


@dataclass(frozen=True)
class Reply:
    """A complete reply: the server gave a finish reason, and every tool call has an id, a name and a text of arguments."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: Literal["stop", "tool_calls", "length", "content_filter"]
    usage: Usage  # of all attempts: what broken ones may have cost is estimated in
    model: str
    attempts: int = 1
    extra: dict[str, Any] = field(
        default_factory=dict
    )  # provider fields to echo: copy into the assistant Message's extra
    notes: tuple[str, ...] = ()  # what was normalised or dropped, for the journal and the loop

    @property
    def empty(self) -> bool:
        """Neither text nor a call: the loop asks again or counts it, it is never a success."""
        return not self.tool_calls and not self.text.strip()


class FailureKind(StrEnum):
    UNREACHABLE = "unreachable"  # connection refused, DNS, 5xx or 429 after all retries
    TIMEOUT = "timeout"  # connect, first token, between chunks or total
    REFUSED = "refused"  # 400, 401, 403, 404, 422: the same request would fail again
    OVERFLOW = "overflow"  # the context is too long for the model
    INCOMPLETE = "incomplete"  # the stream ended without a finish reason, or could not be read
    FILTERED = "filtered"  # the provider's content filter
    RATE_LIMITED = "rate_limited"  # Retry-After beyond our cap


class LLMFailure(Exception):  # noqa: N818
    """No usable reply. `usage` is what it may have cost all the same."""

    def __init__(self, kind: FailureKind, message: str, *, attempts: int = 1, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.attempts, self.usage = kind, message, attempts, usage


class ChatModel(Protocol):
    """A model. `complete` makes at most the attempts its retry policy allows and never returns a partial reply."""

    name: str

    async def complete(self, request: Request, *, deadline_s: float) -> Reply:
        """Raises LLMFailure. Cancellation passes through at once."""

    def estimate_tokens(self, request: Request) -> int:
        """Upper estimate of the prompt's tokens, without network."""

    def price_usd(self, usage: Usage) -> float:
        """What this usage costs; 0 for a model without a known price."""

    async def close(self) -> None: ...
