"""Reads a tool image's folder: `image.toml` (how to run it) and `tools.json` (the entries of its MCP `tools/list`).

An operator's manifest can't ask for less isolation: the keys that would are refused by name, as any unknown key is.
"""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import version
from importlib.resources.abc import Traversable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.catalog.schema import schema_problem
from toolserver.egress.policy import EgressPolicy

MAX_FILE_BYTES = 1 << 20

FORBIDDEN = frozenset(
    {
        "privileged", "cap_add", "capabilities", "mounts", "mount", "volumes", "volume", "binds", "bind", "devices", "device",
        "device_requests", "gpus", "user", "group_add", "userns_mode", "uts_mode", "network", "network_mode", "host_network", "networks",
        "ports", "publish", "pid_mode", "pid", "ipc_mode", "ipc", "cgroup_parent", "cgroupns", "security_opt", "seccomp",
        "apparmor", "sysctls", "ulimits", "docker_socket", "read_only", "runtime", "isolation", "oom_kill_disable", "restart",
    }
)  # fmt: skip


class ManifestProblem(Exception):  # noqa: N818 - reads as what it names
    """A manifest is refused. The message names the image's folder, the file and what is wrong; no path of the host."""


class _LimitsPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_mb: int | None = Field(None, ge=16)
    cpus: float | None = Field(None, gt=0)
    pids: int | None = Field(None, ge=8)
    disk_mb: int | None = Field(None, ge=1)


class _ImageFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")
    kind: Literal["mcp"] = "mcp"
    reference: str = Field(min_length=1, max_length=255, pattern=r"^[a-z0-9][A-Za-z0-9._:/@-]*$")
    command: list[str] = Field(min_length=1, max_length=64)
    workspace: Literal["none", "ro", "rw"]
    egress: Literal["none", "open"] = "none"
    start: Literal["eager", "lazy"] = "lazy"
    optional: bool = False
    host_programs: list[str] = Field(default_factory=list, max_length=8)
    env: dict[str, str] = Field(default_factory=dict)
    limits: _LimitsPart = Field(default_factory=_LimitsPart)


class _ToolEntry(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    title: str | None = None
    description: str = Field(min_length=1, max_length=20_000)
    inputSchema: dict[str, Any]  # noqa: N815 - as MCP spells it
    outputSchema: dict[str, Any] | None = None  # noqa: N815
    annotations: dict[str, Any] = Field(default_factory=dict)


def load_image(folder: Traversable) -> ToolImage:
    """The image of `folder`. Raises ManifestProblem."""
    read = _image_file(folder)
    if read.name != folder.name:
        raise ManifestProblem(
            f"{folder.name}/image.toml: name is {read.name!r}, but must be that of its folder, {folder.name!r}"
        )
    return ToolImage(
        name=read.name,
        reference=_tagged(read.reference),
        command=tuple(read.command),
        workspace=read.workspace,
        egress=EgressPolicy(read.egress),
        start=read.start,
        optional=read.optional,
        host_programs=tuple(read.host_programs),
        env=dict(read.env),
        limits=LimitsOverride(**read.limits.model_dump()),
        tools=_tools(folder, read.name),
    )


def _image_file(folder: Traversable) -> _ImageFile:
    place = f"{folder.name}/image.toml"
    try:
        table = tomllib.loads(_text(folder, "image.toml"))
    except tomllib.TOMLDecodeError as error:
        raise ManifestProblem(f"{place}: not TOML: {error}") from error
    _refuse_forbidden(table, place)
    try:
        read = _ImageFile.model_validate(table)
    except ValidationError as error:
        raise ManifestProblem(f"{place}: {_explain(error)}") from error
    for name in read.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ManifestProblem(f"{place}: env has {name!r}, which is no name of an environment variable")
    return read


def _refuse_forbidden(table: dict[str, Any], place: str) -> None:
    asked = sorted(FORBIDDEN & table.keys())
    limits = table.get("limits")
    asked += sorted(FORBIDDEN & limits.keys()) if isinstance(limits, dict) else []
    if asked:
        raise ManifestProblem(
            f"{place}: asks for {', '.join(asked)}, which no tool image may set: the server alone decides how sandboxes are confined"
        )


def _tools(folder: Traversable, image: str) -> tuple[Tool, ...]:
    place = f"{folder.name}/tools.json"
    try:
        read = json.loads(_text(folder, "tools.json"))
    except (ValueError, RecursionError) as error:
        raise ManifestProblem(f"{place}: not JSON: {error}") from error
    entries = read.get("tools") if isinstance(read, dict) else read
    if not isinstance(entries, list):
        raise ManifestProblem(f'{place}: must be {{"tools": [...]}} or a list of tools')
    tools = tuple(_tool(entry, image, place) for entry in entries)
    names = [tool.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ManifestProblem(f"{place}: these tools are there more than once: {', '.join(twice)}")
    return tools


def _tool(entry: Any, image: str, place: str) -> Tool:
    label = str(entry.get("name", "?"))[:128] if isinstance(entry, dict) else "?"
    try:
        read = _ToolEntry.model_validate(entry)
    except ValidationError as error:
        raise ManifestProblem(f"{place}: tool {label}: {_explain(error)}") from error
    for which, schema in (("inputSchema", read.inputSchema), ("outputSchema", read.outputSchema)):
        problem = None if schema is None else _object_schema_problem(schema)
        if problem is not None:
            raise ManifestProblem(f"{place}: tool {label}: {which}: {problem}")
    title = {"title": read.title} if read.title and "title" not in read.annotations else {}
    tool = Tool(read.name, read.description, read.inputSchema, read.outputSchema, {**title, **read.annotations}, image)
    _ = tool.validator  # compiled now, not in somebody's first call
    return tool


def _object_schema_problem(schema: dict[str, Any]) -> str | None:
    if schema.get("type") != "object":
        return 'its "type" must be "object"'
    return schema_problem(schema)


def _text(folder: Traversable, name: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ManifestProblem(f"{folder.name}/{name}: can't be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ManifestProblem(f"{folder.name}/{name}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ManifestProblem(f"{folder.name}/{name}: not UTF-8") from error


def _tagged(reference: str) -> str:
    """A reference without tag or digest is ours: its tag is the version of this package."""
    if "@" in reference or ":" in reference.rpartition("/")[2]:
        return reference
    return f"{reference}:{version('toolcrib').replace('+', '-')}"


def _explain(error: ValidationError) -> str:
    parts = [f"{'.'.join(str(part) for part in item['loc']) or 'it'}: {item['msg']}" for item in error.errors()[:8]]
    return "; ".join(parts)
