"""The contract's answers as typed values. Unknown fields are ignored; what is missing or null takes its default."""

from __future__ import annotations

import json
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, NoReturn, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from agent.toolserver_client.errors import NoAnswer, NoAnswerKind, ToolServerAnswer

_WITHOUT_BODY = {401: "unauthorized", 403: "forbidden", 413: "too_large", 429: "quota_exceeded"}


class Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class RemoteTool(Wire):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {"type": "object"}
    annotations: dict[str, Any] = {}
    image: str = ""
    retry: str | None = None


class ToolList(Wire):
    tools: list[RemoteTool]


class SessionInfo(Wire):
    id: str = Field(validation_alias=AliasChoices("id", "session_id"), min_length=1)
    state: str = ""
    isolation: Any = None


class RemoteOutcome(Wire):
    """A 200, and equally what an error's detail tells of a call that ran.

    `workspace_changed` None: the server did not say; `workspace_changed_more`: the list is not complete.
    """

    call_id: str = ""
    content: list[dict[str, Any]] = []
    structured: Any = None
    truncated: dict[str, Any] | None = None
    artifacts: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    workspace_changed: list[str] | None = None
    workspace_changed_more: bool = False
    trace_id: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    state: str | None = None


class FileEntry(Wire):
    name: str
    kind: str = "file"
    bytes: int = 0


class FileListing(Wire):
    path: str = ""
    entries: list[FileEntry] = []
    truncated: bool = False


T = TypeVar("T", bound=Wire)


def read_json(body: bytes, status: int) -> Any:
    """The JSON of an answer, free of lone surrogates. Raises NoAnswer."""
    try:
        value = json.loads(body, parse_constant=_refuse)
        if b"\\ud" in body.lower():  # an escaped lone surrogate can't be journalled or sent on
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as problem:
        what = "an HTML page" if body.lstrip()[:1] == b"<" else f"something that is no JSON ({_short(problem)})"
        raise _bad_answer(f"it answered {status} with {what}", status) from problem
    return value


def read_as(model: type[T], value: Any, status: int) -> T:
    """Raises NoAnswer when the value does not have the model's shape."""
    try:
        return model.model_validate(value)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "/".join(str(part) for part in first["loc"])
        raise _bad_answer(
            f"its answer of status {status} is not in the contract's shape: {place or 'the body'}: {first['msg']}",
            status,
        ) from problem


def outcome_in_detail(detail: dict[str, Any]) -> RemoteOutcome:
    """What an error tells of a call's output, artifacts and changes; whatever is not in shape is left out."""
    inner = detail.get("outcome")
    merged = {**inner, **detail} if isinstance(inner, dict) else detail
    known = {name: merged[name] for name in RemoteOutcome.model_fields if name in merged}
    try:
        return RemoteOutcome.model_validate(known)
    except ValidationError as problem:
        broken = {str(entry["loc"][0]) for entry in problem.errors() if entry["loc"]}
        return RemoteOutcome.model_validate({name: item for name, item in known.items() if name not in broken})


def refusal(status: int, headers: dict[str, str], body: bytes) -> ToolServerAnswer:
    """The error of an answer that is not 2xx. Raises NoAnswer for one that is not the contract's: it proves nothing."""
    after = retry_after_s(headers.get("retry-after"))
    try:
        value = read_json(body, status)
    except NoAnswer:
        if status in _WITHOUT_BODY:  # what a proxy says with these statuses has one meaning only
            return ToolServerAnswer(
                status, _WITHOUT_BODY[status], {"message": f"status {status}, without details"}, after
            )
        raise
    detail = value.get("detail") if isinstance(value, dict) else None
    if not isinstance(detail, dict) or not isinstance(detail.get("code"), str):
        if status in _WITHOUT_BODY:
            return ToolServerAnswer(
                status, _WITHOUT_BODY[status], {"message": f"status {status}, without details"}, after
            )
        raise _bad_answer(f"it answered {status} with JSON that is no error of the contract", status)
    told = detail.get("retry_after_s")
    if isinstance(told, int | float) and not isinstance(told, bool) and told >= 0:
        after = max(after or 0.0, float(told))
    return ToolServerAnswer(status, detail["code"], detail, after)


def retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header, given as seconds or as an HTTP date; None for anything else."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, seconds) if seconds == seconds else None  # noqa: PLR0124 - not for nan


def _bad_answer(what: str, status: int) -> NoAnswer:
    return NoAnswer(NoAnswerKind.BAD_ANSWER, f"{what}. Is the ToolServer's URL right, and no proxy in between?", status)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _short(problem: Exception) -> str:
    return str(problem)[:80] or type(problem).__name__
