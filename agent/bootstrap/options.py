"""From the command line's options to settings. Quick to import: the command line does so for `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.errors import UsageProblem

if TYPE_CHECKING:
    from agent.settings import Settings


def read_settings(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Raises UsageProblem that names every wrong setting."""
    from pydantic import ValidationError  # noqa: PLC0415 - `--help` needs none of it

    from agent import settings  # noqa: PLC0415

    unknown = settings.unknown_variables()
    try:
        loaded = settings.load(config, **flags)
    except (ValidationError, OSError, ValueError) as error:  # a broken TOML file is a ValueError
        unknown += settings.problems(error)
    if unknown:
        raise UsageProblem("Wrong settings:\n  " + "\n  ".join(unknown))
    return loaded


def budget_of(
    usd: float | None, tokens: int | None, seconds: float | None, llm_calls: int | None, tool_calls: int | None
) -> dict[str, Any]:
    """The allowances that were given as options."""
    given = {
        "max_usd": usd,
        "max_tokens": tokens,
        "max_seconds": seconds,
        "max_llm_calls": llm_calls,
        "max_tool_calls": tool_calls,
    }
    return {name: value for name, value in given.items() if value is not None}


def flags_of(
    *,
    model: str | None = None,
    base_url: str | None = None,
    toolserver: str | None = None,
    runtime: str | None = None,
    egress: str | None = None,
    runs_dir: Path | None = None,
    budget: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Options as settings, only those that were given: they go before the environment."""
    sections = {
        "llm": {"model": model, "base_url": base_url},
        "toolserver": {"url": toolserver, "runtime": runtime, "egress": egress},
        "budget": budget or {},
    }
    given = {
        name: {key: value for key, value in section.items() if value is not None} for name, section in sections.items()
    }
    flags: dict[str, Any] = {name: section for name, section in given.items() if section}
    return flags if runs_dir is None else {**flags, "runs_dir": runs_dir}
