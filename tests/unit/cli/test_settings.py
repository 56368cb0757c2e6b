from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent import settings
from agent.bootstrap.options import budget_of, flags_of, how_to_resume, read_settings
from agent.errors import UsageProblem


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AGENT_", "OPENAI_")):
            monkeypatch.delenv(name)


def problem_of(config: Path | None = None, **flags: object) -> str:
    with pytest.raises(UsageProblem) as caught:
        read_settings(config, flags)
    return caught.value.message


def test_flags_go_before_environment_before_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[llm]\nmodel = "file"\nbase_url = "http://file/v1"\nmax_tokens = 100\n')
    monkeypatch.setenv("AGENT_LLM__BASE_URL", "http://environment/v1")
    monkeypatch.setenv("AGENT_LLM__MODEL", "environment")
    loaded = read_settings(file, flags_of(model="flag"))
    assert (loaded.llm.model, loaded.llm.base_url, loaded.llm.max_tokens) == ("flag", "http://environment/v1", 100)
    assert loaded.llm.context_tokens == 128_000


def test_openai_variables_are_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://openai/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    loaded = read_settings(None, {})
    assert loaded.llm_base_url == "http://openai/v1"
    assert loaded.llm_api_key is not None
    assert "secret" not in repr(loaded)


def test_empty_variables_count_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LLM__MODEL", "")
    monkeypatch.setenv("AGENT_TOOLSERVER__URL", "")
    loaded = read_settings(None, {})
    assert (loaded.llm.model, loaded.toolserver.url) == (None, None)


def test_every_wrong_setting_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_LLM__MAX_TOKENS", "many")
    monkeypatch.setenv("AGENT_LLM__MODLE", "x")
    monkeypatch.setenv("AGENT_TOOLSERVER__URL", "localhost:8500")
    monkeypatch.setenv("AGENT_TOOLSERVER__RUNTIME", "podman")
    monkeypatch.setenv("AGENT_LMM__MODEL", "x")
    monkeypatch.setenv("AGENT_BUDGET__MAX_USD", "-1")
    message = problem_of()
    for expected in (
        "AGENT_LLM__MAX_TOKENS: Input should be a valid integer",
        "AGENT_LLM__MODLE: there is no such setting",
        "AGENT_TOOLSERVER__URL: must be an address such as http://",
        "AGENT_TOOLSERVER__RUNTIME: Input should be 'auto', 'docker', 'bubblewrap' or 'fake'",
        "AGENT_LMM__MODEL: there is no such section",
        "AGENT_BUDGET__MAX_USD: Input should be greater than 0",
    ):
        assert expected in message


def test_variables_of_other_programs_with_the_prefix_are_left_alone() -> None:
    assert settings.unknown_variables({"AGENT_NAME": "ci", "AGENT_HOME": "/x", "OTHER__THING": "1"}) == []


def test_secrets_are_not_repeated_in_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[llm]\napi_key = ["sk-secret"]\n')
    assert "sk-secret" not in problem_of(file)


def test_a_missing_or_broken_file_is_explained(tmp_path: Path) -> None:
    assert "no settings file" in problem_of(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[llm\n")
    assert "not valid TOML" in problem_of(broken)
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("[lmm]\nmodel = 1\n")
    assert "AGENT_LMM: there is no such setting" in problem_of(unknown)


def test_only_options_that_were_given_become_settings() -> None:
    assert flags_of() == {}
    assert budget_of(None, 5, None, None, 0) == {"max_tokens": 5, "max_tool_calls": 0}
    assert flags_of(runtime="docker", budget={"max_usd": 1.0}) == {
        "toolserver": {"runtime": "docker"},
        "budget": {"max_usd": 1.0},
    }


def test_the_command_that_goes_on_names_the_place_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = flags_of(runs_dir=Path("/some where"))
    assert how_to_resume(read_settings(None, flags), flags, "r-1").endswith(" resume r-1 --runs-dir '/some where'")
    assert how_to_resume(read_settings(None, {}), {}, "r-1").endswith(" resume r-1")
    monkeypatch.setenv("AGENT_RESUME_COMMAND", "demo --resume")
    assert how_to_resume(read_settings(None, flags), flags, "r-1") == "demo --resume r-1 --runs-dir '/some where'"
