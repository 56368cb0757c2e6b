from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agent import settings as agent_settings
from toolserver import settings as toolserver_settings
from toolserver.cli import app

PACKAGES = (("AGENT", agent_settings), ("TOOLSERVER", toolserver_settings))


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """`serve` sets up the log of its process, which here is that of all tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), env=env)


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path))
    made = json.loads(run("keys", "create", "ci", "--tenant", "team", "--scope", "read", "--json", *state).stdout)
    assert made["key"].startswith("tck_")
    plain = run("keys", "create", "other", *state).stdout.strip()
    assert plain.startswith("tck_")
    listed: list[dict[str, Any]] = json.loads(run("keys", "list", "--json", *state).stdout)["keys"]
    assert [(k["name"], k["tenant"], k["scope"]) for k in listed] == [
        ("ci", "team", "read"),
        ("other", "default", "use"),
    ]
    assert made["key"] not in json.dumps(listed)
    assert run("keys", "revoke", made["key_id"], *state).exit_code == 0
    assert "revoked" in run("keys", "list", *state).stdout
    unknown = run("keys", "revoke", "key_unknown", *state)
    assert unknown.exit_code == 2
    assert "keys list" in unknown.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("keys", "create", "x", "--scope", "everything"),
        ("serve", "--port", "99999"),
        ("serve", "--runtime", "vmware"),
        ("serve", "--config", "/nowhere/settings.toml"),
        ("serve", "--log-format", "xml"),
        ("serve", "--host", "0.0.0.0"),
        ("sessions", "list", "--key", "k", "--url", "ftp://x"),
        ("tenants", "set", "shop", "--max-cpu-s", "-3"),
        ("journal", "export", "--since", "2026-13"),
        ("journal", "export", "--until", "2026-02-30T12"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    more = () if arguments[0] in ("sessions", "nonsense") else ("--state-dir", str(tmp_path))
    result = run(*arguments, *more, env={"TOOLSERVER_API_KEY": ""} if arguments[0] == "serve" else None)
    assert result.exit_code == 2, result.output
    assert len(result.output) > 20
    assert "Traceback" not in result.output


def test_a_wrong_quota_or_time_is_told_by_its_option(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path))
    assert "--max-memory-mb many" in run("tenants", "set", "shop", "--max-memory-mb", "many", *state).stderr
    assert run("tenants", "set", "shop", "--max-memory-mb", "5", *state).exit_code == 0
    assert "--since" in run("journal", "export", "--since", "2026-01-32", *state).stderr
    for begun in ("2026", "2026-02", "2026-02-28T23", "2026-02-28T23:59:59.5Z"):
        assert run("journal", "export", "--since", begun, *state).exit_code == 0
    told = run("journal", "tail", *state).stdout
    assert 'quotas={"memory_mb":5}' in told


def test_a_server_that_is_not_there_is_exit_code_5() -> None:
    result = run("sessions", "list", "--key", "k", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 5
    assert "can't be reached" in result.stderr


def test_what_to_do_is_said_where_no_server_answers() -> None:
    assert "toolserver serve" in run("sessions", "list", "--key", "k", "--url", "http://127.0.0.1:9").stderr


def test_every_wrong_setting_is_named_by_its_variable(tmp_path: Path) -> None:
    wrong = {
        "TOOLSERVER_HTTP__PROT": "1",
        "TOOLSERVER_HTPT__PORT": "1",
        "TOOLSERVER_API_KEY": "short",
        "TOOLSERVER_LIMITS__CPUS": "none",
    }
    result = run("serve", "--state-dir", str(tmp_path / "state"), env=wrong)
    assert result.exit_code == 2
    for expected in (
        "TOOLSERVER_HTTP__PROT: there is no such setting",
        "TOOLSERVER_HTPT__PORT: there is no such section; the sections are TOOLSERVER_CALL__…",
        "TOOLSERVER_API_KEY: must have 8 characters or more",
        "TOOLSERVER_LIMITS__CPUS: Input should be a valid number",
    ):
        assert expected in result.stderr
    assert "short" not in result.stderr
    assert not (tmp_path / "state").exists()


def test_a_secret_that_was_pasted_into_the_settings_is_not_repeated(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[tools.leak]\nimage = "x:1"\nsecrets = {TOKEN = "hunter2-pasted"}\n')
    result = run("serve", "--state-dir", str(tmp_path / "state"), "--config", str(config))
    assert result.exit_code == 2
    assert "never the value itself" in result.stderr
    assert "hunter2" not in result.stderr


def test_both_packages_word_an_unknown_setting_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_HTPT__PORT", "1")
    monkeypatch.setenv("TOOLSERVER_HTPT__PORT", "1")
    told = {name: (settings.unknown_variables()[0]).partition("; the sections are")[0] for name, settings in PACKAGES}
    assert told == {name: f"{name}_HTPT__PORT: there is no such section" for name, _ in PACKAGES}
    assert toolserver_settings.unknown_variables({"TOOLSERVER_CONFIG": "x", "TOOLSERVER_URL": "y"}) == []


def test_looking_at_keys_makes_nothing(tmp_path: Path) -> None:
    result = run("keys", "list", "--json", "--state-dir", str(tmp_path / "state"))
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"keys": []}
    assert not (tmp_path / "state").exists()


def test_times_of_keys_are_iso_8601_in_utc(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path))
    made = json.loads(run("keys", "create", "ci", "--json", *state).stdout)
    assert datetime.fromisoformat(made["created_at"]).utcoffset() == timedelta(0)
    run("keys", "revoke", made["key_id"], *state)
    (listed,) = json.loads(run("keys", "list", "--json", *state).stdout)["keys"]
    assert listed["created_at"] == made["created_at"]
    assert datetime.fromisoformat(listed["revoked_at"]).utcoffset() == timedelta(0)


def test_the_version_is_an_option_and_there_is_no_completion() -> None:
    assert run("--version").stdout.strip() == version("toolcrib")
    assert "completion" not in run("--help").stdout


def test_descriptions_of_tools_are_not_cut_within_a_word() -> None:
    whole = {tool["name"]: tool["description"] for tool in json.loads(run("tools", "list", "--json").stdout)["tools"]}
    for line in run("tools", "list").stdout.splitlines()[1:]:
        name, _, told = re.split(r"\s{2,}", line.strip(), maxsplit=2)
        assert re.match(re.escape(told.removesuffix(" …")) + r"\W", whole[name]), told


def test_a_damaged_database_is_told_not_thrown(tmp_path: Path) -> None:
    (tmp_path / "toolserver.db").write_bytes(b"garbage" * 1000)
    result = run("keys", "list", "--state-dir", str(tmp_path))
    assert result.exit_code == 2
    assert "damaged" in result.stderr


def test_the_tools_are_listed_without_a_server() -> None:
    tools = json.loads(run("tools", "list", "--json").stdout)["tools"]
    assert "python_execute" in {tool["name"] for tool in tools}
    assert "python_execute" in run("tools", "list").stdout


def test_the_doctor_tells_what_the_runtime_enforces(tmp_path: Path) -> None:
    result = run("doctor", "--runtime", "fake", "--state-dir", str(tmp_path), "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["runtime"], found["problem"]) == ("fake", None)
    assert found["isolation"]["memory"].startswith("not enforced")
    assert found["warnings"]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys, toolserver.cli; print([m for m in ('fastapi','uvicorn','sqlalchemy','docker','pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for command in ((), ("serve",), ("keys",), ("sessions",), ("tools",), ("images",), ("doctor",)):
        assert run(*command, "--help").exit_code == 0
