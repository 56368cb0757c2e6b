"""Clients of others against a real server: they list, call, fail, hear of progress, cancel, come back, and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.llm.mock_script import parse_script
from agent.llm.mock_server import MockServer
from tests.integration.mcp_clients.conftest import tools
from tests.integration.mcp_clients.loopback import Loopback
from tests.server_process import ServerProcess

CLIENTS = Path(__file__).with_name("clients")
LIMIT_S = 120
pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

Begin = Callable[..., subprocess.Popen[str]]
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def begin(server: ServerProcess, relay: Loopback, client_folder: Callable[[str], Path]) -> Begin:
    """Starts a client's script."""

    def begin(kind: str, script: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        folder = client_folder(kind)
        told = {"MCP_URL": f"{server.url}/mcp", "MCP_KEY": server.key, "MCP_RELAY": relay.url, **more}
        program, place = ("python", CLIENTS / script) if kind != "node" else ("node", folder / script)
        if kind == "node":  # which finds its modules from the script's own folder
            place.write_text((CLIENTS / script).read_text())
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PYTHON"))}
        return subprocess.Popen(
            [folder / "bin" / program, place, *arguments], env={**kept, **told},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return begin


@pytest.fixture
def run(begin: Begin) -> Run:
    """Runs a client's script; what it saw."""

    def run(kind: str, script: str, *arguments: str, **more: str) -> dict[str, Any]:
        seen = last_words(begin(kind, script, *arguments, **more))
        assert isinstance(seen, dict)
        return seen

    return run


def last_words(process: subprocess.Popen[str]) -> Any:
    with process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, (out + err)[-4000:]
    return json.loads(out.splitlines()[-1])


def check_story(seen: dict[str, Any], revision: str) -> None:
    """What a client of any revision sees."""
    assert (seen["revision"], seen["server"]) == (revision, "toolcrib")
    assert {"python_execute", "shell_execute", "file_read", "call_wait", "test_simple_text"} <= set(seen["tools"])
    assert len(seen["tools"]) == len(set(seen["tools"]))
    assert seen["kept"].strip() == "42"
    assert "10001" in seen["shell"]
    assert "written" in seen["read"]
    is_error, text = seen["failed"]
    assert is_error is True
    assert "ZeroDivisionError" in text
    code, message = seen["unknown"]
    assert code == -32602
    assert "no_such_tool" in message
    is_error, text = seen["asked"]
    assert not is_error, text
    assert "Who are you?" in text
    assert "ann@example.org" in text
    assert seen["progress"] == [[0, 100], [50, 100], [100, 100]]
    begun, *sleeping = seen["cancelled"].split()
    assert begun == "begun", "the call went on until its end"
    assert sleeping[:1] == ["0"], "what the call started is still there"


def sessions(server: ServerProcess) -> list[dict[str, Any]]:
    with server.client() as http:
        found: list[dict[str, Any]] = http.get("/v1/sessions").json()["sessions"]
    return [session for session in found if session["state"] != "closed"]


def labelled(server: ServerProcess, name: str) -> list[str]:
    return [str(session["id"]) for session in sessions(server) if session["labels"].get("mcp.session") == name]


def test_the_python_client_of_the_revisions_with_sessions(run: Run, server: ServerProcess, relay: Loopback) -> None:
    cuts, resumed = relay.cuts, relay.resumed
    seen = run("python-1", "python_1.py")
    check_story(seen, "2025-11-25")
    assert seen["bad"][0] is True
    assert (relay.cuts, relay.resumed) == (cuts + 1, resumed + 1)
    assert seen["resumed"].strip() == "whole"
    assert labelled(server, seen["session"]) == [], "its session was not closed with the client"


def test_the_python_client_of_the_revision_without_sessions(run: Run, server: ServerProcess) -> None:
    seen = run("python-2", "python_2.py", MCP_SESSION="python-two")
    check_story(seen, "2026-07-28")
    assert seen["bad"][0] is True
    assert seen["resumed"].strip() == "42"
    assert len(labelled(server, "python-two")) == 1


def test_the_typescript_client_of_the_revisions_with_sessions(run: Run, server: ServerProcess, relay: Loopback) -> None:
    cuts, resumed = relay.cuts, relay.resumed
    seen = run("node", "typescript.mjs", "1")
    check_story(seen, "2025-11-25")
    assert seen["bad"][0] is True
    assert (relay.cuts, relay.resumed) == (cuts + 1, resumed + 1)
    assert seen["resumed"].strip() == "whole"
    assert labelled(server, seen["session"]) == []


def test_the_typescript_client_of_the_revision_without_sessions(run: Run, server: ServerProcess) -> None:
    seen = run("node", "typescript.mjs", "2", MCP_SESSION="typescript-two")
    check_story(seen, "2026-07-28")
    assert seen["bad"][0] is True
    assert seen["resumed"].strip() == "42"
    assert len(labelled(server, "typescript-two")) == 1


def test_an_agent_of_the_openai_agents_sdk_works_with_the_tools(run: Run, server: ServerProcess) -> None:
    before = {session["id"] for session in sessions(server)}
    calls = [
        ("shell_execute", {"command": "printf 'a\\nb\\nc\\n' > lines.txt"}),
        ("python_execute", {"code": "raise ValueError('not yet')"}),
        ("python_execute", {"code": "print('lines:', len(open('lines.txt').readlines()))"}),
    ]
    replies: list[dict[str, Any]] = [{"call": [{"name": name, "arguments": given}]} for name, given in calls]
    replies.append({"text": "The file has {{tool:/lines: (\\d+)/}} lines."})
    with MockServer(parse_script({"rule": [{"name": "agent", "reply": replies}]})) as model:
        seen = run("python-1", "agents_sdk.py", MODEL_URL=model.base_url)
    assert seen["answer"] == "The file has 3 lines."
    assert "not yet" in seen["outputs"][1]
    assert {"python_execute", "test_image_content"} <= set(seen["tools"])
    assert {session["id"] for session in sessions(server)} == before


def test_langchain_loads_and_invokes_the_tools(run: Run, server: ServerProcess) -> None:
    before = {session["id"] for session in sessions(server)}
    seen = run("python-1", "langchain_tools.py")
    assert {"python_execute", "shell_execute", "test_simple_text"} <= set(seen["tools"])
    assert "code" in seen["schema"]
    assert "42" in seen["kept"]
    assert "written" in seen["shell"]
    status, text = seen["failed"]
    assert status == "error"
    assert "ZeroDivisionError" in text
    assert "NameError" in seen["alone"]
    assert {session["id"] for session in sessions(server)} == before


def test_clients_that_watch_are_told_of_new_tools(begin: Begin, server: ServerProcess, added_image: str) -> None:
    watching = [begin("python-1", "watch.py"), begin("node", "watch.mjs")]
    for process in watching:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n", process.communicate()
    tools(server, "add", added_image, "--name", "second", "--allow-tool", "test_simple_text", "--yes")
    try:
        for process in watching:
            assert "second.test_simple_text" in last_words(process)
    finally:
        tools(server, "remove", "second")
