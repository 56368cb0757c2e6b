"""All settings of the ToolServer, read here alone: defaults < TOML file < environment < flag.

Environment: `TOOLSERVER_SECTION__KEY`, for example `TOOLSERVER_RUNTIME__NAME=docker`. Unknown keys are refused.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from toolserver.egress.policy import EgressPolicy
from toolserver.tool_entry import NAME, RESERVED, ToolEntry

MIN_CPUS = 0.01  # the least that a container engine can share out


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HttpSettings(Section):
    host: str = "127.0.0.1"
    port: int = Field(8500, ge=0, le=65535)  # 0: any free one, printed at start
    max_body_mb: int = Field(8, ge=1)  # JSON bodies; uploads are bounded by the workspace quota
    max_upload_mb: int = Field(1024, ge=1)
    body_timeout_s: float = Field(30.0, gt=0)
    header_timeout_s: float = Field(15.0, gt=0)
    max_connections: int = Field(512, ge=1)
    max_streams: int = Field(64, ge=1)  # event streams open at a time
    max_streams_per_tenant: int = Field(32, ge=1)
    drain_s: float = Field(5.0, ge=0)  # how long a shutdown waits for running calls
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header of requests to /mcp, beside addresses and localhost
    allowed_origins: tuple[str, ...] = ()  # web pages that may use /mcp, as "https://host[:port]"


class RuntimeSettings(Section):
    name: Literal["auto", "docker", "bubblewrap", "fake"] = "auto"
    docker_host: str | None = None  # None: DOCKER_HOST or the engine's usual socket
    api_timeout_s: float = Field(20.0, gt=0)
    start_timeout_s: float = Field(30.0, gt=0)
    isolation: Literal["require-gvisor", "prefer-gvisor", "runc"] = "runc"  # docker: the engine's runtime
    disk: Literal["auto", "quota", "loop", "accounted"] = (
        "auto"  # how a workspace's size is held; auto: the hardest that works
    )
    python: str | None = None  # bubblewrap: the interpreter of its sandboxes; None: the server's own


class SessionSettings(Section):
    ttl_s: float = Field(3600, gt=0)
    max_ttl_s: float = Field(86_400, gt=0)
    idle_s: float = Field(900, gt=0)
    max_sessions: int = Field(64, ge=1)
    max_sessions_per_tenant: int = Field(32, ge=1)
    total_memory_mb: int | None = Field(None, ge=64)  # granted to all sessions together; None: not bounded
    tombstone_days: float = Field(7, gt=0)
    lease_s: float = Field(900, ge=5)  # how long a sandbox waits for a server that died, before it ends by itself
    at_shutdown: Literal["end", "keep"] = "end"  # keep: sessions go on with the next start on the same state folder


class PoolSettings(Section):
    """Sandboxes started ahead. `min` of each image that sessions start with, `max` and `memory_mb` (MiB in use) of all together."""

    enabled: bool = True
    min: int = Field(1, ge=0)
    max: int = Field(8, ge=1)
    memory_mb: int = Field(512, ge=16)


class LimitSettings(Section):
    memory_mb: int = Field(1024, ge=64)
    cpus: float = Field(1.0, ge=MIN_CPUS)
    pids: int = Field(256, ge=16)
    disk_mb: int = Field(1024, ge=1)
    max_memory_mb: int = Field(8192, ge=64)
    max_cpus: float = Field(8.0, ge=MIN_CPUS)
    max_pids: int = Field(1024, ge=16)
    max_disk_mb: int = Field(16_384, ge=1)


class CallSettings(Section):
    wait_s: float = Field(30.0, ge=0)  # when the request names none
    max_wait_s: float = Field(120.0, gt=0)
    deadline_s: float = Field(300.0, gt=0)
    max_deadline_s: float = Field(3600.0, gt=0)
    max_text_bytes: int = Field(65_536, ge=1024)
    kill_grace_s: float = Field(8.0, gt=0)  # past the deadline, before the server ends the whole sandbox
    max_concurrent_per_session: int = Field(32, ge=1)
    max_running: int = Field(256, ge=1)  # in all sessions together; more wait in the queue
    keep_days: float = Field(7, gt=0)  # how long outcomes are kept for their Idempotency-Key


LogFormat = Literal["auto", "json", "text"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(Section):
    format: LogFormat = "auto"  # text on a terminal, else json
    level: LogLevel = "info"


class TelemetrySettings(Section):
    # base URL of a collector; None: OTEL_EXPORTER_OTLP_ENDPOINT, without it no spans
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://.")


class SnapshotSettings(Section):
    """`max_mb` bounds what the snapshots of one tenant take on the server's disk, and the data of a single one."""

    keep_days: float = Field(7, ge=0)  # after the end of the session that made them
    max_mb: int = Field(8192, ge=1)


class TenantSettings(Section):
    """What each tenant may have that `toolserver tenants set` says nothing else of. None: no limit of its own."""

    max_calls: int | None = Field(None, ge=1)  # at a time, in all of its sessions
    max_memory_mb: int | None = Field(None, ge=1)  # granted to all of its sessions together
    max_disk_mb: int | None = Field(None, ge=1)  # granted to all of its sessions together
    max_cpu_s: float | None = Field(None, gt=0)  # of its calls, within cpu_window_h
    cpu_window_h: float = Field(24.0, gt=0)


class QueueSettings(Section):
    """What waits while the server is full."""

    wait_s: float = Field(5.0, ge=0)  # when the request names none
    max_wait_s: float = Field(120.0, gt=0)  # of a request for a session; a call's own wait_s bounds it
    max_waiting: int = Field(128, ge=1)  # requests of one tenant


class JournalSettings(Section):
    segment_mb: int = Field(32, ge=1)
    keep_days: float = Field(90, gt=0)
    fsync: bool = False  # each record, before it counts as written: outlives the machine, not only the server


class EgressSettings(Section):
    """What sandboxes may reach through the egress proxy. MiB, seconds.

    `max_mode` and, for the mode allow, `allow` bound every session. `allow_private` names host:port pairs that may be reached
    although they are not public. `ca_file` holds certificates (PEM) of authorities that vouch for hosts with a secret header,
    beside those that the proxy's system trusts.
    """

    max_mode: Literal["none", "allow", "open"] = "open"
    allow: tuple[str, ...] = ()
    allow_private: tuple[str, ...] = ()
    max_connections: int = Field(64, ge=1, le=1024)  # at a time, of one sandbox
    max_connection_mb: int = Field(4096, ge=1)  # each way
    max_total_mb: int = Field(65_536, ge=1)  # both ways, of one sandbox of a session
    max_connection_s: float = Field(3600, gt=0)
    idle_s: float = Field(300, gt=0)
    docker_network: str = Field("bridge", min_length=1)  # docker: the engine's network that the proxy is on
    ca_file: Path | None = None

    @model_validator(mode="after")
    def _rules_are_readable(self) -> Self:
        EgressPolicy("allow", self.allow)
        for pair in self.allow_private:
            if pair.endswith(":*") or len(EgressPolicy("allow", (pair,)).allow) != 1:
                raise ValueError(f"allow_private takes pairs of host:port, not {pair[:80]!r}")
        if self.allow and self.max_mode != "allow":
            raise ValueError('allow goes with max_mode "allow"')
        return self

    @model_validator(mode="after")
    def _authorities_are_readable(self) -> Self:
        self.authorities()
        return self

    def authorities(self) -> str:
        """What stands in `ca_file`. Raises ValueError."""
        if self.ca_file is None:
            return ""
        try:
            text = self.ca_file.read_text("ascii")
            ssl.create_default_context(cadata=text)
        except (ValueError, ssl.SSLError) as problem:
            raise ValueError(f"ca_file can't be used, {self.ca_file}: it holds no certificate") from problem
        except OSError as problem:
            raise ValueError(f"ca_file can't be used, {self.ca_file}: {problem.strerror}") from problem
        return text


class McpSettings(Section):
    """`/mcp`. `egress` and, for the mode allow, `egress_allow` are those of the sessions that MCP clients work in."""

    egress: Literal["none", "allow", "open"] = "none"
    egress_allow: tuple[str, ...] = ()
    page_tools: int = Field(200, ge=1)  # tools in one answer of tools/list
    max_listeners: int = Field(128, ge=1)  # streams for changes of the tool list, open at a time
    max_listeners_per_tenant: int = Field(64, ge=1)

    @model_validator(mode="after")
    def _rules_are_readable(self) -> Self:
        EgressPolicy("allow", self.egress_allow)
        if self.egress_allow and self.egress != "allow":
            raise ValueError('egress_allow goes with egress "allow"')
        return self


class WebSettings(Section):
    """The `web` tool image."""

    search_provider: Literal["none", "searxng", "brave"] = "none"
    searxng_url: str | None = None
    brave_api_key: SecretStr | None = None


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="TOOLSERVER_",
        env_nested_delimiter="__",
        env_ignore_empty=True,  # an empty variable is one that is not set, as compose files pass them
        frozen=True,
        extra="forbid",
        nested_model_default_partial_update=True,
    )

    state_dir: Path = Path("~/.local/state/toolcrib/toolserver").expanduser()
    api_key: SecretStr | None = Field(None, min_length=8)  # the first admin key
    http: HttpSettings = HttpSettings()
    runtime: RuntimeSettings = RuntimeSettings()
    session: SessionSettings = SessionSettings()
    pool: PoolSettings = PoolSettings()
    limits: LimitSettings = LimitSettings()
    call: CallSettings = CallSettings()
    tenant: TenantSettings = TenantSettings()
    queue: QueueSettings = QueueSettings()
    snapshot: SnapshotSettings = SnapshotSettings()
    journal: JournalSettings = JournalSettings()
    egress: EgressSettings = EgressSettings()
    mcp: McpSettings = McpSettings()
    web: WebSettings = WebSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tools: dict[str, ToolEntry] = Field(default_factory=dict)  # added images, by name

    @field_validator("tools")
    @classmethod
    def _names(cls, tools: dict[str, ToolEntry]) -> dict[str, ToolEntry]:
        for name in tools:
            if re.fullmatch(NAME, name) is None or name in RESERVED:
                raise ValueError(
                    f"{name[:60]!r} is no name for an added image: small letters, digits and '-', not one of the server's own"
                )
        return tools

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls)
        return init_settings, env_settings, toml


def load(config: Path | None = None, **flags: Any) -> Settings:
    """Read all sources. Raises pydantic.ValidationError, OSError or tomllib.TOMLDecodeError; `problems` explains them."""
    if config is None:
        return Settings(**flags)
    if not config.is_file():
        raise FileNotFoundError(f"no settings file {config}")

    class SettingsOfFile(Settings):  # pydantic-settings takes its file from the class
        model_config = SettingsConfigDict(toml_file=config)

    return SettingsOfFile(**flags)


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables such as `TOOLSERVER_HTPT__PORT` that name a section that does not exist, each as one line.

    Variables without `__` are left alone: the command line has some, and other programs may.
    """
    sections = {
        f"TOOLSERVER_{name.upper()}"
        for name, kind in Settings.model_fields.items()
        if name == "tools" or (isinstance(kind.annotation, type) and issubclass(kind.annotation, Section))
    }
    names = os.environ if environment is None else environment
    unknown = (name for name in names if name.upper().startswith("TOOLSERVER_") and "__" in name)
    known = ", ".join(sorted(f"{section}__…" for section in sections))
    return [
        f"{name}: there is no such section; the sections are {known}"
        for name in sorted(unknown)
        if name.upper().partition("__")[0] not in sections
    ]


def problems(error: Exception) -> list[str]:
    """What is wrong with the settings, one line a problem, each named by its environment variable."""
    if isinstance(error, ValidationError):
        return [_problem(dict(entry)) for entry in error.errors(include_url=False)]
    return [str(error)]


def _problem(entry: dict[str, Any]) -> str:
    place = [str(part) for part in entry["loc"]]
    name, message = "TOOLSERVER_" + "__".join(place).upper(), str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    if entry["type"] == "too_short" and "min_length" in (entry.get("ctx") or {}):
        return f"{name}: must have {entry['ctx']['min_length']} characters or more"
    if any("key" in part or "secret" in part for part in place) or isinstance(entry["input"], dict | list):
        return f"{name}: {message}"
    return f"{name}: {message} (it is {entry['input']!r})"
