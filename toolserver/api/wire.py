"""Request bodies and queries, as the contract has them. Unknown fields are refused; nothing is converted silently."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from toolserver.api.strict_json import escape
from toolserver.errors import invalid_all
from toolserver.settings import MIN_CPUS

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MAX_ENV_BYTES = 64 << 10
_NUMBER = re.compile(r"[0-9]{1,308}(\.[0-9]{1,308})?([eE][+-]?[0-9]{1,3})?")


class WireModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _env(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if _ENV_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name[:50]!r} is no name of an environment variable (letters, digits and _, not first a digit)"
            )
        if "\0" in text:
            raise ValueError(f"the value of {name[:50]} has a NUL character")
    if sum(len(name) + len(text.encode()) for name, text in value.items()) > _MAX_ENV_BYTES:
        raise ValueError(f"more than {_MAX_ENV_BYTES} bytes in all")
    return value


ShortText = Annotated[str, Field(max_length=256)]
Labels = Annotated[dict[ShortText, ShortText], Field(max_length=64)]
Env = Annotated[dict[str, str], Field(max_length=256), AfterValidator(_env)]


class LimitsBody(WireModel):
    memory_mb: int | None = Field(None, ge=64, description="MiB")
    cpus: float | None = Field(None, ge=MIN_CPUS, description="cores")
    pids: int | None = Field(None, ge=16, description="processes and threads")
    disk_mb: int | None = Field(None, ge=1, description="MiB of workspace")


class EgressBody(WireModel):
    mode: Literal["none", "allow", "open"] | None = None  # none of them: allow where there is a list, else none
    allow: list[Annotated[str, Field(max_length=300)]] | None = Field(None, max_length=256)


class SessionBody(WireModel):
    ttl_s: float | None = Field(None, gt=0)
    idle_s: float | None = Field(None, gt=0)
    images: list[ShortText] | None = Field(None, min_length=1, max_length=64)
    env: Env = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    limits: LimitsBody = Field(default_factory=LimitsBody)
    egress: EgressBody = Field(default_factory=EgressBody)
    from_snapshot: Annotated[str, Field(max_length=256)] | None = None
    wait_s: float | None = Field(None, ge=0, description="seconds to wait for a place when the server is full")


class CallBody(WireModel):
    arguments: dict[str, Any] = Field(default_factory=dict)
    wait_s: float | None = Field(None, ge=0)
    deadline_s: float | None = Field(None, gt=0)


class RestoreBody(WireModel):
    snapshot_id: Annotated[str, Field(max_length=256)]


class EmptyBody(WireModel):
    pass


def _number(value: Any) -> Any:
    """Query values are texts: a number is what reads as one."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,15}", value) else value


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


QueryNumber = Annotated[float, BeforeValidator(_number)]
QueryWhole = Annotated[int, BeforeValidator(_whole)]
QueryFlag = Annotated[bool, BeforeValidator(_flag)]


class NoQuery(WireModel):
    pass


class SearchQuery(WireModel):
    q: str = Field(max_length=4096)
    k: QueryWhole = Field(8, ge=1, le=100)


class CallQuery(WireModel):
    wait_s: QueryNumber | None = Field(None, ge=0)
    after: QueryWhole = Field(
        0, ge=0, description="characters of the output so far that are known already; of events: bytes"
    )


class ListingQuery(WireModel):
    path: str = Field("", max_length=4096)
    limit: QueryWhole = Field(1000, ge=1, le=10_000)


class SessionsQuery(WireModel):
    all_tenants: QueryFlag = Field(False, description="sessions of every tenant; needs the scope admin")


class DiffQuery(WireModel):
    from_: Annotated[str, Field(alias="from", max_length=256)]
    to: Annotated[str, Field(max_length=256)]


M = TypeVar("M", bound=WireModel)


def read(model: type[M], data: dict[str, Any]) -> M:
    """Raises invalid_arguments with all errors and their pointers."""
    value, errors = read_all(model, data)
    if value is None:
        raise invalid_all(errors)
    return value


def read_all(model: type[M], data: dict[str, Any]) -> tuple[M | None, list[dict[str, str]]]:
    """The model; or None and what is wrong with its shape, for whoever has more to find wrong with `data`."""
    try:
        return model.model_validate(data), []
    except ValidationError as problem:
        return None, _errors(problem)


def beyond(data: dict[str, Any], most: Iterable[tuple[str, float]]) -> list[dict[str, str]]:
    """Errors for the numbers at these pointers that are larger than they may be. What is no number is for the model to refuse."""
    return [
        {"pointer": pointer, "message": f"is more than this server grants: at most {limit:g}"}
        for pointer, limit in most
        if isinstance(value := at(data, pointer), int | float) and not isinstance(value, bool) and value > limit
    ]


def at(data: Any, pointer: str) -> Any:
    """What stands at a pointer of plain names; None where nothing does."""
    for name in pointer.split("/")[1:]:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def read_query(model: type[M], items: Iterable[tuple[str, str]]) -> M:
    """Raises invalid_arguments; a name given twice is one of the errors."""
    data: dict[str, str] = {}
    for name, value in items:
        if name in data:
            raise invalid_all([{"pointer": "/" + escape(name), "message": "is given twice"}])
        data[name] = value
    return read(model, data)


def _errors(problem: ValidationError) -> list[dict[str, str]]:
    errors = []
    for error in problem.errors(include_url=False, include_context=False, include_input=False):
        pointer = "".join("/" + escape(str(part)) for part in error["loc"] if part != "[key]")
        unknown = error["type"] == "extra_forbidden"
        if unknown:
            message = f"there is no field {str(error['loc'][-1])[:100]!r} here"
        elif error["type"] in {"model_type", "dict_type"}:
            message = "must be an object"
        else:
            message = error["msg"].removeprefix("Value error, ")
        errors.append({"pointer": pointer, "message": message})
    return errors
