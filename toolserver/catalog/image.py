"""Tool images and their tools, as the server knows them once their manifests were read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from jsonschema.protocols import Validator

from toolserver.catalog.cli_template import CliTemplate
from toolserver.catalog.schema import compile_schema
from toolserver.catalog.secret import HeaderSecret, SecretSource
from toolserver.egress.policy import EgressPolicy


@dataclass(frozen=True, eq=False)
class Tool:
    """One tool. `image` is the name of the image that has it, or `toolserver` for the server's own.

    `remote_name` is what the image itself calls it, where the operator or a collision gave it another name. retry: of an added
    image, what the operator said of it; None: the annotations hold.
    """

    name: str
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    annotations: dict[str, Any]
    image: str
    remote_name: str | None = None
    retry: Literal["never", "idempotent"] | None = None

    @property
    def own_name(self) -> str:
        """As its image calls it."""
        return self.remote_name or self.name

    def as_json(self) -> dict[str, Any]:
        """As the HTTP contract shows it. A new dict, whose schemas are shared: don't change them."""
        shown: dict[str, Any] = {"name": self.name, "description": self.description, "input_schema": self.input_schema}
        if self.output_schema is not None:
            shown["output_schema"] = self.output_schema
        shown |= {"annotations": self.annotations, "image": self.image}
        return shown if self.retry is None else {**shown, "retry": self.retry}

    @cached_property
    def validator(self) -> Validator:
        """Compiled from `input_schema`, once. Use `arguments.check`, which bounds its time."""
        return compile_schema(self.input_schema)

    @cached_property
    def output_validator(self) -> Validator | None:
        """Compiled from `output_schema`, once. Use `arguments.output_errors`, which bounds its time."""
        return None if self.output_schema is None else compile_schema(self.output_schema)


@dataclass(frozen=True)
class LimitsOverride:
    """Bounds below the session's limits: the lower one holds; None: the session's own. MiB, cores, processes, MiB."""

    memory_mb: int | None = None
    cpus: float | None = None
    pids: int | None = None
    disk_mb: int | None = None


@dataclass(frozen=True)
class ToolImage:
    """An image whose tools run in sandboxes: an MCP server on stdio, or (`kind` cli) a command-line program.

    reference: the engine's name of the image, with its tag. digest: the image that was approved; sandboxes start from
    exactly that. command: what to run in it; empty: its own entrypoint and command. egress: the most that its sandboxes
    get; a session has less where its own is less. start: `eager` with the session, `lazy` at its first call. origin:
    `builtin` images come with the server and speak its extension, `added` ones run as they are. scope: `shared` sandboxes
    serve all sessions of a tenant. env is fixed at start and visible to whoever may inspect the sandbox. secrets are not in
    it: variables whose values are read when a sandbox starts and are neither logged nor shown. deadline_s: the most for a
    call of its tools. cli: of `kind` cli, by the tool's own name. retry: `idempotent` tools may be repeated by whoever called them. era: the MCP era that it was found to speak. optional: offered only where it can be started. host_programs: the
    browsers that it needs of the host under bubblewrap, whose sandboxes have the host's programs.
    """

    name: str
    reference: str
    command: tuple[str, ...]
    workspace: Literal["none", "ro", "rw"]
    egress: EgressPolicy
    start: Literal["eager", "lazy"]
    env: Mapping[str, str]
    limits: LimitsOverride
    tools: tuple[Tool, ...]
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    kind: Literal["mcp", "cli"] = "mcp"
    origin: Literal["builtin", "added"] = "builtin"
    scope: Literal["session", "shared"] = "session"
    digest: str | None = None
    working_dir: str | None = None
    header_secrets: tuple[HeaderSecret, ...] = ()
    deadline_s: float | None = None
    retry: Literal["never", "idempotent"] = "never"
    era: str | None = None
    cli: Mapping[str, CliTemplate] = field(default_factory=dict)

    @property
    def starts_with_session(self) -> bool:
        """A command starts with its call, whatever `start` says."""
        return self.start == "eager" and self.kind == "mcp"

    @property
    def pooled(self) -> bool:
        """Whether sandboxes of it may be started for nobody yet: those of others have no way to be given to a session later."""
        return self.starts_with_session and self.origin == "builtin"

    @property
    def needs_egress(self) -> bool:
        """Whether its tools do nothing in a session that reaches nothing."""
        return (
            self.origin == "builtin"
            and bool(self.tools)
            and all(tool.annotations.get("openWorldHint") is True for tool in self.tools)
        )

    @property
    def keeps_files(self) -> bool:
        """Whether a session's files can be had through it: added images may write them, and speak no such protocol."""
        return self.workspace == "rw" and self.origin == "builtin"

    optional: bool = False
    host_programs: tuple[str, ...] = ()
