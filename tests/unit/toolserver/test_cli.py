from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from toolserver.cli import app


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
        ("nonsense",),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    more = () if arguments[0] in ("sessions", "nonsense") else ("--state-dir", str(tmp_path))
    result = run(*arguments, *more, env={"TOOLSERVER_API_KEY": ""} if arguments[0] == "serve" else None)
    assert result.exit_code == 2, result.output
    assert len(result.output) > 20
    assert "Traceback" not in result.output


def test_a_server_that_is_not_there_is_exit_code_5() -> None:
    result = run("sessions", "list", "--key", "k", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 5
    assert "can't be reached" in result.stderr


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
