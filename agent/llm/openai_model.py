"""ChatModel over any server that speaks OpenAI's chat completions. The only file that knows the SDK and its exceptions.

The SDK's own retries are off: `retry_policy` is the one layer. A reply counts only with a finish reason; silence is bounded
at connect, up to the first chunk, between chunks and in total, whatever the server does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import Any

import httpx  # openai 2.x lets httpx's own errors out of a stream; 3.x, on another library, wraps all of them
import openai

from agent.errors import UsageProblem
from agent.llm.attempt import AttemptFailed, from_status, from_stream_error, incomplete, timed_out
from agent.llm.dialect import Dialect, adapt
from agent.llm.history import lint
from agent.llm.model import FailureKind, LLMFailure, Message, Reply, Request, Usage
from agent.llm.normalise import BROKEN_OFF, normalise
from agent.llm.pricing import price_of
from agent.llm.retry_policy import Retries, RetryPolicy
from agent.llm.stream import MAX_CALLS, Assembler
from agent.llm.tokens import add_usage, estimate_request, estimate_text, read_usage
from agent.llm.tool_names import sent_names
from agent.llm.wire import extra_fields, payload
from agent.settings import LLMSettings, Settings

DEFAULT_BASE_URL = "https://api.openai.com/v1"
ROLE_HEADER = "X-Toolcrib-Role"
MAX_REPLY_CHARS = 4_000_000
USAGE_GRACE_S = 5.0  # for what follows the finish reason
_NO_KEY = "none"  # local servers want no key, the SDK wants one

log = logging.getLogger(__name__)


class OpenAIModel:
    """One model on one server. Safe to share between tasks of one event loop; close it at the end."""

    def __init__(
        self, name: str, settings: LLMSettings, *, base_url: str | None = None, api_key: str | None = None,
        policy: RetryPolicy | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.price = price_of(name, settings)
        self.dialect = Dialect()
        self._settings = settings
        self._key = api_key
        self._policy = policy or RetryPolicy(settings.max_attempts, settings.max_retry_after_s)
        self._client = openai.AsyncOpenAI(
            api_key=api_key or _NO_KEY,
            base_url=base_url or DEFAULT_BASE_URL,
            max_retries=0,
            timeout=openai.Timeout(None, connect=settings.connect_s),
        )

    @classmethod
    def from_settings(cls, settings: Settings, role: str | None = None) -> OpenAIModel:
        """The model of `role`, or the default one. Raises UsageProblem when none is set."""
        name = settings.llm.role_models.get(role or "", settings.llm.model)
        if not name:
            raise UsageProblem("no model is set: set AGENT_LLM__MODEL, llm.model in the settings file, or --model")
        key = settings.llm_api_key
        return cls(name, settings.llm, base_url=settings.llm_base_url, api_key=key.get_secret_value() if key else None)

    async def complete(self, request: Request, *, deadline_s: float) -> Reply:
        limit_s = min(deadline_s, self._settings.total_s)
        linted = lint(request.messages)
        if linted.mends:
            log.info("history mended", extra={"role": request.role, "mends": sorted(set(linted.mends))})
        retries = Retries(self._policy, limit_s)
        exchanges: list[_Exchange] = []

        async def attempt() -> Reply:
            return await self._attempt(request, linted.messages, exchanges)

        total = asyncio.timeout(limit_s)
        try:
            async with total:
                reply = await retries.run(attempt)
        except TimeoutError as error:
            spent = add_usage(retries.spent(), exchanges[-1].usage_so_far() if exchanges else None)
            what = f"no complete reply of {self.name} within {limit_s:g} s"
            raise LLMFailure(FailureKind.TIMEOUT, what, attempts=max(retries.attempts, 1), usage=spent) from error
        spent = add_usage(reply.usage, retries.spent()) or reply.usage
        return Reply(
            reply.text,
            reply.tool_calls,
            reply.finish_reason,
            spent,
            reply.model,
            retries.attempts,
            reply.extra,
            reply.notes,
        )

    def estimate_tokens(self, request: Request) -> int:
        return estimate_request(request)

    def price_usd(self, usage: Usage) -> float:
        return self.price.usd(usage)

    async def close(self) -> None:
        await self._client.close()

    async def _attempt(self, request: Request, messages: Sequence[Message], exchanges: list[_Exchange]) -> Reply:
        """One attempt; asked again in another dialect at once when the server refuses a field of ours."""
        while True:
            dialect = self.dialect
            exchange = _Exchange(self, request, messages, dialect)
            exchanges.append(exchange)
            try:
                return await exchange.run()
            except _FieldRefused as refused:
                sent = extra_fields(messages) if dialect.echo_extra else frozenset()
                adapted = adapt(dialect, refused.failure.message, sent)
                if adapted is None:
                    raise refused.failure from refused
                log.info("request adapted to the server", extra={"model": self.name, "dialect": adapted})
                self.dialect = adapted

    def hide_key(self, text: str) -> str:
        return text.replace(self._key, "[redacted]") if self._key else text

    @property
    def settings(self) -> LLMSettings:
        return self._settings

    @property
    def client(self) -> openai.AsyncOpenAI:
        return self._client


class _FieldRefused(Exception):  # noqa: N818
    """A 400, 404 or 422 that may be about a field that can be left out."""

    def __init__(self, failure: AttemptFailed) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Exchange:
    """One HTTP exchange: the request, and the reply as far as it came."""

    def __init__(self, model: OpenAIModel, request: Request, messages: Sequence[Message], dialect: Dialect) -> None:
        self._model, self._request, self._messages, self._dialect = model, request, messages, dialect
        self._times = model.settings
        self._assembler = Assembler(sent_names(tool.name for tool in request.tools).values())
        self._accepted = False  # the server may be working, and charging
        self._begun = False  # the reply has begun to come

    async def run(self) -> Reply:
        """Raises AttemptFailed, with what it may have cost, or _FieldRefused."""
        body = payload(self._request, self._messages, self._model.name, self._dialect)
        try:
            with self._mapped():
                if self._dialect.streaming:
                    await self._stream(body)
                else:
                    self._take_whole(await self._create(body))
            return self._reply()
        except AttemptFailed as failure:
            failure.usage = failure.usage or self.usage_so_far()
            raise

    def usage_so_far(self) -> Usage | None:
        """What this exchange may have cost, by our estimate; None when the server never took the request."""
        if not self._accepted:
            return None
        prompt = estimate_request(self._request)
        return Usage(prompt, -(-self._assembler.chars // 3), estimated=True)

    async def _create(self, body: dict[str, Any]) -> Any:
        # Through `extra_body` our fields go out as they are; the two named arguments are the SDK's minimum.
        rest = {key: value for key, value in body.items() if key not in ("model", "messages", "stream")}
        self._accepted = True
        return await self._model.client.chat.completions.create(
            model=body["model"],
            messages=body["messages"],
            stream=body.get("stream", False),
            extra_body=rest,
            extra_headers={ROLE_HEADER: self._request.role},
        )

    async def _stream(self, body: dict[str, Any]) -> None:
        times, started = self._times, asyncio.get_running_loop().time()
        async with _silence(times.first_token_s, "the model's server sent nothing"):
            stream = await self._create(body)
        self._begun = True
        try:
            content_type = stream.response.headers.get("content-type", "").lower()
            left_s = max(times.first_token_s - (asyncio.get_running_loop().time() - started), 0.001)
            if "html" in content_type:
                raise _web_page()
            if "application/json" in content_type:  # the server does not know `stream`, and answered as a whole
                async with _silence(left_s, "the model's server sent no body"):
                    self._take_whole(json.loads(await stream.response.aread()))
                return
            await self._read_chunks(stream, left_s)
        finally:
            await stream.close()

    async def _read_chunks(self, stream: Any, first_s: float) -> None:
        assembler, times = self._assembler, self._times
        wait_s, what = first_s, "the model's server sent no token"
        while True:
            try:
                async with _silence(wait_s, what):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except (AttemptFailed, openai.APIConnectionError, httpx.TransportError):
                if assembler.finish_reason:
                    return  # only the usage is missing
                raise
            assembler.feed(_plain(chunk))
            self._check_size()
            wait_s, what = times.between_chunks_s, "the model's server stopped in mid-reply and sent no more"
            if assembler.finish_reason:
                wait_s = min(wait_s, USAGE_GRACE_S)

    def _take_whole(self, answer: Any) -> None:
        body = _plain(answer)
        if isinstance(body, str) and body.lstrip()[:1] == "<":
            raise _web_page()
        if not isinstance(body, Mapping):
            raise incomplete("the server's answer is no JSON object")
        if isinstance(body.get("error"), Mapping):
            raise from_stream_error(str(body["error"].get("code", "")), self._told(body["error"].get("message")))
        self._assembler.feed(body)
        self._check_size()

    def _check_size(self) -> None:
        told = ""
        if self._assembler.chars > MAX_REPLY_CHARS:
            told = f"the reply passed {MAX_REPLY_CHARS:,} characters"
        elif self._assembler.too_many_calls:
            told = f"the reply has more than {MAX_CALLS} calls"
        if told:
            raise AttemptFailed(FailureKind.INCOMPLETE, told, retryable=False)

    def _reply(self) -> Reply:
        completion = self._assembler.completion()
        reason = completion.finish_reason
        if not reason:
            raise incomplete("the server gave no finish reason")
        if reason.lower() in BROKEN_OFF:
            raise incomplete(f"the server broke off with the finish reason {reason!r}")
        usage = read_usage(
            completion.usage,
            prompt_estimate=estimate_request(self._request),
            completion_estimate=estimate_text(completion.text)
            + sum(estimate_text(c.arguments) for c in completion.calls),
        )
        found = normalise(completion, self._request)
        if found.finish_reason == "content_filter":
            message = "the provider's content filter stopped the reply"
            raise AttemptFailed(FailureKind.FILTERED, message, retryable=False, usage=usage)
        return Reply(
            found.text, found.tool_calls, found.finish_reason, usage, completion.model or self._model.name,
            extra=found.extra, notes=found.notes,
        )  # fmt: skip

    def _told(self, text: Any) -> str:
        return self._model.hide_key(text if isinstance(text, str) else json.dumps(text, default=str))

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """The SDK's exceptions as AttemptFailed, cause kept."""
        try:
            yield
        except openai.APIStatusError as error:
            self._accepted = False
            failure = self._from_status(error)
            if error.status_code in (400, 404, 422) and failure.kind is FailureKind.REFUSED:
                raise _FieldRefused(failure) from error
            raise failure from error
        except openai.APITimeoutError as error:
            self._accepted = False  # the SDK's only timeout is that of connecting
            raise timed_out("no connection to the model's server", self._times.connect_s) from error
        except (openai.APIConnectionError, httpx.TransportError) as error:
            if self._begun:
                raise incomplete("the connection was lost in mid-reply") from error
            self._accepted = False
            raise self._unreachable(error) from error
        except (json.JSONDecodeError, UnicodeDecodeError, openai.APIResponseValidationError) as error:
            raise incomplete(f"what the server sent can't be read ({type(error).__name__})") from error
        except openai.APIError as error:
            raise from_stream_error(str(error.code or ""), self._told(error.message)) from error
        except openai.OpenAIError as error:
            raise AttemptFailed(FailureKind.REFUSED, self._told(str(error)), retryable=False) from error

    def _from_status(self, error: openai.APIStatusError) -> AttemptFailed:
        body = error.body if isinstance(error.body, Mapping) else {}
        inner = body.get("error")
        body = inner if isinstance(inner, Mapping) else body
        code = " ".join(str(body[key]) for key in ("code", "type") if body.get(key))
        text = next((body[k] for k in ("message", "detail", "error") if body.get(k)), inner or error.response.text)
        headers = {key.lower(): value for key, value in error.response.headers.items()}
        return from_status(error.status_code, headers, code, self._told(text), now=datetime.now(UTC))

    def _unreachable(self, error: Exception) -> AttemptFailed:
        reason = str(error.__cause__ or error) or type(error).__name__
        url = str(self._model.client.base_url)
        message = f"no connection to the model's server at {url}: {self._told(reason)}"
        return AttemptFailed(FailureKind.UNREACHABLE, message, retryable=True)


@asynccontextmanager
async def _silence(limit_s: float, what: str) -> AsyncIterator[None]:
    """A bound on a wait: AttemptFailed TIMEOUT when it passes. The total deadline, outside of it, passes through."""
    bound = asyncio.timeout(limit_s)
    try:
        async with bound:
            yield
    except TimeoutError as passed:
        if not bound.expired():
            raise
        raise timed_out(what, limit_s) from passed


def _web_page() -> AttemptFailed:
    message = "the server answered with a web page, not a chat completion: check llm.base_url (most end in /v1)"
    return AttemptFailed(FailureKind.REFUSED, message, retryable=False)


def _plain(value: Any) -> Any:
    """A record of the SDK as plain JSON; fields of wrong type and unknown fields are kept."""
    return value.to_dict(mode="json", warnings=False) if isinstance(value, openai.BaseModel) else value
