"""The worker as an MCP server: lines in, lines out, whatever is sent."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sandbox_images.base import arguments
from tests.unit.workspace.worker_process import REPOSITORY, WorkerProcess

TOOLS: list[dict[str, Any]] = json.loads((REPOSITORY / "sandbox_images/workspace/tools.json").read_text())["tools"]


def test_initialize_announces_the_extension(worker: WorkerProcess) -> None:
    answer = worker.result(
        "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"}
    )
    assert answer["protocolVersion"] == "2025-06-18"
    assert answer["capabilities"]["experimental"]["toolcrib/worker"] == {"version": 2}
    worker.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')
    assert worker.result("ping") == {}
    assert worker.result("tools/list")["tools"] == TOOLS


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: str(tool["name"]))
def test_every_tool_has_a_closed_valid_schema_and_annotations(tool: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
    assert tool["inputSchema"]["additionalProperties"] is False
    assert len(tool["description"]) > 15
    assert all(
        len(p["description"]) > 10 and p["type"] in arguments.TYPES for p in tool["inputSchema"]["properties"].values()
    )
    assert {"readOnlyHint", "idempotentHint", "destructiveHint", "openWorldHint"} <= tool["annotations"].keys()


def test_wrong_arguments_are_named_all_at_once_and_nothing_runs(worker: WorkerProcess, tmp_path: Path) -> None:
    outcome = worker.call("file_write", path=5, content={"a": 1}, bogus=1)
    assert outcome.end == "invalid"
    assert [e["pointer"] for e in outcome.meta["errors"]] == ["/path", "/content", "/bogus"]
    assert [e["pointer"] for e in worker.call("file_write").meta["errors"]] == ["/path", "/content"]
    assert worker.call("shell_read", job_id="x", wait_s=1e9).end == "invalid"
    assert worker.call("shell_execute", command="true", background=1).end == "invalid"
    assert not list(tmp_path.iterdir())


def test_nonsense_gets_an_error_and_the_worker_goes_on(worker: WorkerProcess) -> None:
    for line, code in (
        (b"nonsense", -32700), (b"\xff\xfe", -32700), (b"[" * 100_000, -32700), (b"[]", -32600), (b'{"jsonrpc": "1.0", "id": 1}', -32600),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "no/such"}', -32601), (b'{"jsonrpc": "2.0", "id": 7, "method": 5}', -32601),
        (b'{"jsonrpc": "2.0", "id": [], "method": "ping"}', -32600), (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": [1]}', -32602),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "no_such_tool"}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {}}', -32602),
        (b'{"jsonrpc": "2.0", "id": 7, "method": "toolcrib/file.read", "params": {"handle": "x"}}', -32602),
        (b"x" * (9 << 20), -32600),
    ):  # fmt: skip
        worker.write(line)
        assert worker.message()["error"]["code"] == code, line[:60]
    worker.write(b"")
    worker.write(b'{"jsonrpc": "2.0", "id": 1000, "result": {}}')
    assert worker.result("ping") == {}


def test_a_cancelled_request_gets_no_answer(worker: WorkerProcess) -> None:
    number = worker.start("shell_execute", command="sleep 705")
    worker.write(
        json.dumps({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": number}}).encode()
    )
    assert worker.shell("pgrep -f 'sleep 70[5]' | wc -l", deadline_s=20).end == "done"
    assert worker.result("ping") == {}
    assert number not in worker._answers


def test_an_id_can_be_used_again_only_after_its_answer(worker: WorkerProcess) -> None:
    line = b'{"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": {"name": "python_execute", "arguments": {"code": "import time; time.sleep(0.3)"}}}'
    worker.write(line)
    worker.write(line)
    assert worker.message()["error"]["code"] == -32600
    assert worker.message()["result"]["isError"] is False
    worker.write(line)
    assert worker.message()["result"]["isError"] is False


def test_a_plain_mcp_client_needs_no_extension(worker: WorkerProcess) -> None:
    answer = worker.result("tools/call", name="python_execute", arguments={"code": "6 * 7"})
    assert (answer["content"], answer["isError"]) == ([{"type": "text", "text": "42"}], False)


def test_binding_happens_once_and_is_checked(worker: WorkerProcess) -> None:
    wrong: tuple[Any, ...] = ({"A": 1}, {"A=B": "x"}, {"A": "\x00"}, {"": ""}, ["A"], "x")
    for env in wrong:
        assert "error" in worker.request("toolcrib/bind", env=env, limits={})
    assert worker.result("toolcrib/bind", env={"A": "1"}, limits={"memory_mb": 256, "disk_mb": 64}) == {}
    assert "error" in worker.request("toolcrib/bind", env={}, limits={})


def test_files_are_served_while_python_and_a_shell_are_busy(worker: WorkerProcess) -> None:
    busy = worker.start("python_execute", code="import time; time.sleep(1.5); 'slow'")
    shell = worker.start("shell_execute", command="sleep 1.5; echo slow")
    quick = worker.call("file_write", path="f", content="x")
    assert quick.meta["usage"]["wall_ms"] < 1400
    assert not worker._answers
    assert worker.finish(busy).structured["result"] == "'slow'"
    assert worker.finish(shell).stdout == "slow\n"


def test_an_idle_worker_and_its_interpreter_are_small(worker: WorkerProcess) -> None:
    worker.python("1")
    children = subprocess.run(
        ["pgrep", "-P", str(worker.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    total = 0
    for pid in (worker.process.pid, *children):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        total += int(fields["Private_Dirty"].split()[0])
    assert total < 18_000  # KiB that no other process shares
