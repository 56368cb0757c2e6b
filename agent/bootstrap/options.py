"""From the command line's options to settings. Quick to import: the command line does so for `--help`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.errors import UsageProblem

if TYPE_CHECKING:
    from agent.settings import Settings

_NO_MODEL = """No model is configured. Set these three, in the environment or under [llm] of a settings file:
  AGENT_LLM__MODEL     the model's name                          (or --model)
  AGENT_LLM__BASE_URL  any OpenAI-compatible server, with /v1    (or --base-url; falls back to OPENAI_BASE_URL)
  AGENT_LLM__API_KEY   its key, if it wants one                  (falls back to OPENAI_API_KEY)
To try it without a model, serve a script:  agent mock SCRIPT --port 8600
  and then:  agent run GOAL --model mock --base-url http://127.0.0.1:8600/v1"""
_NO_PRICE = """A budget in dollars needs prices, and nobody knows that of {names}. Set what a million tokens cost:
  AGENT_LLM__PRICE_PROMPT_USD_PER_MTOK and AGENT_LLM__PRICE_COMPLETION_USD_PER_MTOK (0 for a model that costs nothing),
or bound the run with --max-tokens or --max-llm-calls instead of --max-usd."""


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


def need_model(settings: Settings) -> None:
    """Raises UsageProblem when no model is set, or when a budget in dollars can't hold because a price is unknown."""
    from agent.llm.pricing import unpriced  # noqa: PLC0415 - `--help` needs none of it

    if not settings.llm.model:
        raise UsageProblem(_NO_MODEL)
    if settings.budget.max_usd is not None and (names := unpriced(settings.llm)):
        raise UsageProblem(_NO_PRICE.format(names=", ".join(names)))


def how_to_resume(settings: Settings, flags: dict[str, Any], run_id: str) -> str:
    """The command that goes on with a run: the program as it can be called here, and the place that was named."""
    command = f"{settings.resume_command or f'{_program()} resume'} {run_id}"
    return f"{command} --runs-dir {shlex.quote(str(settings.runs_dir))}" if "runs_dir" in flags else command


def _program() -> str:
    """`agent` where the shell finds this very program by that name."""
    called, found = Path(sys.argv[0]), shutil.which("agent")
    if called.name == "__main__.py":
        return f"{shlex.quote(_short(sys.executable))} -m agent"
    if found is not None and Path(found).resolve() == called.resolve():
        return "agent"
    return shlex.quote(_short(str(called)))


def _short(path: str) -> str:
    return min(path, os.path.relpath(path), key=len)


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
