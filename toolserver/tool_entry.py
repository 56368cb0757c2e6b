"""What the operator grants an added tool image: the same fields in the settings (`[tools.NAME]`) and in the database.

All is denied by default: no files, no way out, no secret. What no image may have (mounts, devices, users, ...) has no field.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from toolserver.egress.policy import EgressPolicy

NAME = r"^[a-z][a-z0-9-]{0,40}$"
REFERENCE = r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$"
RESERVED = frozenset({"toolserver", "workspace", "web", "browser"})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SOURCE = re.compile(r"file:/[^\0]*|env:[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")


def _one_line(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold NUL")
    return text


def _source(text: str) -> str:
    """The text is not repeated: whoever wrote a secret itself here must not find it in a log."""
    if _SOURCE.fullmatch(text) is None:
        raise ValueError("the source of a secret is file:PATH (absolute) or env:VARIABLE, never the value itself")
    return text


def _public_name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", text) is None:
        raise ValueError(f"{text[:60]!r} is no name for a tool: 1 to 128 letters, digits, '_', '.' and '-'")
    return text


Text = Annotated[str, AfterValidator(_one_line)]
Source = Annotated[str, AfterValidator(_source)]
PublicName = Annotated[str, AfterValidator(_public_name)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class EntryLimits(_Part):
    """Below the session's limits; what is not named is the session's own. MiB, cores, processes, MiB."""

    memory_mb: int | None = Field(None, ge=16)
    cpus: float | None = Field(None, gt=0)
    pids: int | None = Field(None, ge=8)
    disk_mb: int | None = Field(None, ge=1)


class HeaderEntry(_Part):
    """A header that the egress proxy puts into requests to `host`: ports 80 and 443, or the one of `host:port`."""

    host: str
    header: str
    source: Source
    prefix: str = Field("", max_length=100, pattern=r"^[ -~]*$")

    @field_validator("host")
    @classmethod
    def _host(cls, text: str) -> str:
        rules = EgressPolicy("allow", (text,)).allow
        if "*" in text:
            raise ValueError("is one host, not many")
        return rules[0] if len(rules) == 1 else rules[0].rpartition(":")[0]

    @field_validator("header")
    @classmethod
    def _name(cls, text: str) -> str:
        if _HEADER.fullmatch(text) is None:
            raise ValueError("is no name of an HTTP header")
        return text


class Override(_Part):
    """What is shown of a tool in place of what its image says."""

    description: str | None = Field(None, min_length=1, max_length=20_000)
    title: str | None = Field(None, min_length=1, max_length=200)


class Command(_Part):
    """A tool of a command-line image. `argv` and the rest: docs/how-to/cli-images.md. Without `input_schema` it is made
    of the template's placeholders: texts, required where they stand outside of a group.
    """

    description: str = Field(min_length=1, max_length=20_000)
    argv: list[str | list[str]]
    stdin: str | None = None
    output: Literal["text", "json"] = "text"
    stderr: Literal["failed", "always"] = "failed"
    exit_codes: dict[str, Literal["done", "failed", "invalid"]] = Field(default_factory=dict)
    files: list[str] = Field(default_factory=list)
    allow_dash: list[str] = Field(default_factory=list)
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] = Field(default_factory=dict)

    def template(self) -> dict[str, Any]:
        """As CliTemplate.load takes it."""
        return self.model_dump(exclude={"description", "input_schema", "annotations"})


class ToolEntry(_Part):
    """One added image. egress: `none`, `open`, or a list of `host:port`. command: empty for the image's own. allow: only these of
    its tools, by the image's names. rename: by the image's names. commands: of kind `cli`, by the tool's name.
    """

    image: str = Field(min_length=1, max_length=255, pattern=REFERENCE)
    kind: Literal["mcp", "cli"] = "mcp"
    command: list[Text] = Field(default_factory=list, max_length=64)
    working_dir: Text | None = Field(None, pattern=r"^/")
    env: dict[str, Text] = Field(default_factory=dict)
    secrets: dict[str, Source] = Field(default_factory=dict)
    header_secrets: list[HeaderEntry] = Field(default_factory=list)
    workspace: Literal["none", "ro", "rw"] = "none"
    egress: Literal["none", "open"] | list[str] = "none"
    scope: Literal["session", "shared"] = "session"
    start: Literal["eager", "lazy"] = "lazy"
    limits: EntryLimits = EntryLimits()
    deadline_s: float | None = Field(None, gt=0)
    retry: Literal["never", "idempotent"] = "never"
    allow: list[str] | None = None
    rename: dict[str, PublicName] = Field(default_factory=dict)
    override: dict[str, Override] = Field(default_factory=dict)
    commands: dict[PublicName, Command] = Field(default_factory=dict)

    @field_validator("egress")
    @classmethod
    def _rules(cls, told: str | list[str]) -> str | list[str]:
        if isinstance(told, list):
            return list(EgressPolicy("allow", tuple(told)).allow)
        return told

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in (*self.env, *self.secrets):
            if _VARIABLE.fullmatch(name) is None:
                raise ValueError(f"{name[:60]!r} is no name of an environment variable")
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"{both[0]} is in env and in secrets")
        if self.header_secrets and not self.policy.reaches_out:
            raise ValueError("header_secrets are put into requests, and egress is none: name the hosts in egress")
        if self.scope == "shared" and self.workspace != "none":
            raise ValueError("a shared sandbox serves several sessions, so it can't have a workspace")
        if len(set(self.rename.values())) < len(self.rename):
            raise ValueError("rename gives one name to two tools")
        if (self.kind == "cli") != bool(self.commands):
            raise ValueError("an image of kind cli has commands, and one of kind mcp has none")
        return self

    @property
    def policy(self) -> EgressPolicy:
        return EgressPolicy("allow", tuple(self.egress)) if isinstance(self.egress, list) else EgressPolicy(self.egress)
