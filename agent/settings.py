"""All settings of the agent, read here alone: defaults < TOML file < environment < flag.

Environment: `AGENT_SECTION__KEY`, for example `AGENT_LLM__MODEL`. `AGENT_LLM__BASE_URL` and `AGENT_LLM__API_KEY` fall back
to `OPENAI_BASE_URL` and `OPENAI_API_KEY`. Unknown keys are refused; an empty variable counts as not set.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

RuntimeName = Literal["auto", "docker", "bubblewrap", "fake"]
EgressMode = Literal["none", "open"]


def _web_address(value: str) -> str:
    if not value.startswith(("http://", "https://")) or not value.partition("://")[2].strip("/"):
        raise ValueError("must be an address such as http://127.0.0.1:8500")
    return value


WebAddress = Annotated[str, AfterValidator(_web_address)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LLMSettings(Section):
    """Times in seconds. `role_models` maps a role to another model name."""

    model: str | None = None
    base_url: WebAddress | None = None
    api_key: SecretStr | None = None
    role_models: dict[str, str] = {}
    max_tokens: int = Field(4096, ge=16)
    context_tokens: int = Field(128_000, ge=1024)
    temperature: float | None = None
    connect_s: float = Field(10.0, gt=0)
    first_token_s: float = Field(120.0, gt=0)
    between_chunks_s: float = Field(60.0, gt=0)
    total_s: float = Field(600.0, gt=0)
    max_attempts: int = Field(4, ge=1)
    max_retry_after_s: float = Field(60.0, gt=0)
    price_prompt_usd_per_mtok: float | None = Field(None, ge=0)
    price_cached_usd_per_mtok: float | None = Field(None, ge=0)
    price_completion_usd_per_mtok: float | None = Field(None, ge=0)


class ToolServerSettings(Section):
    """`url` None: an embedded ToolServer is started on loopback for the run."""

    url: WebAddress | None = None
    api_key: SecretStr | None = None
    wait_s: float = Field(30.0, gt=0)
    deadline_s: float = Field(300.0, gt=0)
    connect_s: float = Field(5.0, gt=0)
    max_attempts: int = Field(5, ge=1)
    max_continuations: int = Field(10, ge=1)
    breaker_failures: int = Field(5, ge=1)
    breaker_reset_s: float = Field(15.0, gt=0)
    max_observation_chars: int = Field(12_000, ge=500)
    runtime: RuntimeName = "auto"  # of an embedded one
    egress: EgressMode = "none"  # open: tools, and code that runs in them, may reach public addresses
    start_s: float = Field(60.0, gt=0)  # how long an embedded one may take until it is ready


class LoopSettings(Section):
    max_steps: int = Field(15, ge=1)  # of the ReACT loop a task; the last must submit
    max_refinements: int = Field(3, ge=0)
    max_revisions: int = Field(3, ge=0)
    max_depth: int = Field(3, ge=1)
    max_width: int = Field(5, ge=1)
    min_first_tasks: int = Field(2, ge=1)
    max_first_tasks: int = Field(4, ge=1)
    max_tasks: int = Field(20, ge=1)
    max_calls_per_step: int = Field(8, ge=1)  # tool calls in one reply; the rest are answered without being run
    max_summaries: int = Field(20, ge=0)  # long tool outputs that the model shortens, a run; the rest is cut
    max_corrections: int = Field(2, ge=0)  # corrective turns of a role whose structured answer is not valid


class BudgetSettings(Section):
    """Allowances of a run; None: bounded only by what the limits of the loops allow."""

    max_tokens: int | None = Field(None, ge=1)
    max_usd: float | None = Field(None, gt=0)
    max_seconds: float | None = Field(None, gt=0)
    max_llm_calls: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="AGENT_", env_nested_delimiter="__", frozen=True, extra="forbid", nested_model_default_partial_update=True,
        populate_by_name=True, env_ignore_empty=True,
    )  # fmt: skip

    runs_dir: Path = Path("runs")
    resume_command: str | None = None  # what is told to go on with a run, before its id; None: `agent resume`
    llm: LLMSettings = LLMSettings()
    toolserver: ToolServerSettings = ToolServerSettings()
    loop: LoopSettings = LoopSettings()
    budget: BudgetSettings = BudgetSettings()
    openai_base_url: WebAddress | None = Field(
        None, validation_alias=AliasChoices("OPENAI_BASE_URL", "openai_base_url")
    )
    openai_api_key: SecretStr | None = Field(None, validation_alias=AliasChoices("OPENAI_API_KEY", "openai_api_key"))

    @property
    def llm_base_url(self) -> str | None:
        return self.llm.base_url or self.openai_base_url

    @property
    def llm_api_key(self) -> SecretStr | None:
        return self.llm.api_key or self.openai_api_key

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load(config: Path | None = None, **flags: Any) -> Settings:
    """Read all sources. Raises pydantic.ValidationError, OSError or tomllib.TOMLDecodeError; `problems` explains them."""
    if config is None:
        return Settings(**flags)
    if not config.is_file():
        raise FileNotFoundError(f"no settings file {config}")

    class SettingsOfFile(Settings):  # pydantic-settings takes its file from the class
        model_config = SettingsConfigDict(toml_file=config)

    try:
        return SettingsOfFile(**flags)
    except tomllib.TOMLDecodeError as error:
        raise tomllib.TOMLDecodeError(f"the settings file {config} is not valid TOML: {error}") from error


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables such as `AGENT_LMM__MODEL` that name a section that does not exist, each as one line.

    Variables without `__` are left alone: other programs use the prefix too.
    """
    sections = {f"AGENT_{name.upper()}" for name, kind in Settings.model_fields.items() if _is_section(kind.annotation)}
    names = os.environ if environment is None else environment
    unknown = (name for name in names if name.upper().startswith("AGENT_") and "__" in name)
    known = ", ".join(sorted(f"{section}__…" for section in sections))
    return [
        f"{name}: there is no such section; the sections are {known}"
        for name in sorted(unknown)
        if name.upper().partition("__")[0] not in sections
    ]


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def problems(error: Exception) -> list[str]:
    """What is wrong with the settings, one line a problem, each named by its environment variable."""
    if isinstance(error, ValidationError):
        return [_problem(dict(entry)) for entry in error.errors(include_url=False, include_context=False)]
    return [str(error)]


def _problem(entry: dict[str, Any]) -> str:
    place = [str(part) for part in entry["loc"]]
    name = place[0].upper() if place[0].upper().startswith("OPENAI_") else "AGENT_" + "__".join(place).upper()
    message = str(entry["msg"]).removeprefix("Value error, ")
    if entry["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    if "api_key" in place or isinstance(entry["input"], dict | list):
        return f"{name}: {message}"
    return f"{name}: {message} (it is {entry['input']!r})"
