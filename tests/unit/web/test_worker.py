"""The worker as an MCP server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.web.site import Reply, Site, drip
from tests.unit.web.stand_in_proxy import StandInProxy
from tests.unit.web.worker_process import Worker, command_line, running_worker

SLOW = drip(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n", b"0", 0.1, 150)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in found.read_text().split()] if found.exists() else []


def test_it_introduces_itself_with_the_extension(worker: Worker) -> None:
    answer = worker.ask(
        "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "t", "version": "1"}
    )
    assert answer["protocolVersion"] == "2025-06-18"
    assert answer["capabilities"]["experimental"]["toolcrib/worker"] == {"version": 2}
    worker.notify("notifications/initialized")
    assert [tool["name"] for tool in worker.ask("tools/list")["tools"]] == ["web_fetch", "web_search"]
    assert worker.ask("ping") == {}


def test_an_outcome_has_every_field(worker: Worker, site: Site) -> None:
    site.pages["/"] = Reply(b"x", "text/plain")
    outcome = worker.fetch(site.url("/")).outcome
    assert set(outcome) == {
        "end", "message", "state", "exit_code", "signal", "truncated", "artifacts", "usage", "workspace_changed", "workspace_changed_more",
    }  # fmt: skip
    assert outcome["message"] is None
    assert outcome["usage"]["wall_ms"] >= 0


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"url": 5},
        {"url": "http://x/", "format": "xml"},
        {"url": "http://x/", "start": -1},
        {"url": "http://x/", "max_chars": True},
    ],
)
def test_bad_arguments_are_invalid(worker: Worker, arguments: dict[str, object]) -> None:
    ending = worker.call("web_fetch", arguments)
    assert ending.end == "invalid"
    assert ending.outcome["errors"][0]["pointer"].startswith("/")


def test_cancelling_ends_the_call_at_once(worker: Worker, site: Site) -> None:
    site.pages["/slow"] = SLOW
    request_id = worker.start(
        "web_fetch", {"url": site.url("/slow")}, call_id="c1", deadline_s=60, max_text_bytes=65_536
    )
    until = time.monotonic() + 10
    while "Received" not in json.dumps(worker.ask("toolcrib/peek", call_id="c1")) and time.monotonic() < until:
        time.sleep(0.05)
    assert "Received" in worker.ask("toolcrib/peek", call_id="c1")["content"][0]["text"]
    assert worker.ask("toolcrib/cancel", call_id="c1") == {"found": True}
    result = worker.wait(request_id, 5)["result"]
    assert result["_meta"]["toolcrib/outcome"]["end"] == "cancelled"
    assert "Received" in result["content"][0]["text"]
    assert worker.ask("toolcrib/cancel", call_id="c1") == {"found": False}
    assert worker.ask("toolcrib/peek", call_id="c1") == {"content": []}


def test_mcps_own_cancelling_is_not_answered(worker: Worker, site: Site) -> None:
    site.pages["/slow"] = SLOW
    request_id = worker.start(
        "web_fetch", {"url": site.url("/slow")}, call_id="c2", deadline_s=60, max_text_bytes=65_536
    )
    worker.notify("notifications/cancelled", requestId=request_id)
    until = time.monotonic() + 10
    while worker.ask("toolcrib/cancel", call_id="c2")["found"] and time.monotonic() < until:
        time.sleep(0.05)
    assert worker._answers[request_id].empty()
    for _ in range(10):
        assert worker.ask("ping") == {}


def test_a_call_id_runs_once(worker: Worker, site: Site) -> None:
    site.pages["/slow"] = SLOW
    about = {"call_id": "twice", "deadline_s": 2, "max_text_bytes": 65_536}
    first = worker.start("web_fetch", {"url": site.url("/slow")}, **about)
    again = worker.wait(worker.start("web_fetch", {"url": site.url("/slow")}, **about))
    assert again["error"]["data"]["kind"] == "call_exists"
    assert worker.wait(first)["result"]["_meta"]["toolcrib/outcome"]["end"] == "deadline"
    again = worker.wait(worker.start("web_fetch", {"url": site.url("/slow")}, **about))
    assert again["error"]["data"]["kind"] == "call_exists"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"not json\n", -32700),
        (b"\xff\xfe\n", -32700),
        (b"[" * 100_000 + b"\n", -32700),
        (b'{"id": 1}\n', -32600),
        (b"[1]\n", -32600),
    ],
)
def test_lines_that_are_no_message_are_answered_with_an_error(worker: Worker, line: bytes, code: int) -> None:
    worker.write(line)
    assert worker.wait(None)["error"]["code"] == code
    assert worker.ask("ping") == {}


def test_a_line_without_end_is_refused_and_the_worker_lives(worker: Worker) -> None:
    worker.write(b'{"jsonrpc": "2.0", "id": 1, "method": "' + b"x" * (9 << 20) + b'"}\n')
    assert worker.wait(None)["error"]["code"] == -32700
    assert worker.ask("ping") == {}


@pytest.mark.parametrize(
    ("method", "params", "code", "said"),
    [
        ("nothing/like/this", {}, -32601, "no method"),
        ("toolcrib/file.stat", {"path": "a"}, -32601, "files are the workspace image's"),
        ("toolcrib/archive.open", {"mode": "r"}, -32601, "files are the workspace image's"),
        ("tools/call", {"name": "rm", "arguments": {}}, -32602, "Unknown tool: rm"),
        ("tools/call", {"name": ["web_fetch"], "arguments": {}}, -32602, "Unknown tool"),
        ("tools/call", {"name": "web_fetch", "arguments": []}, -32602, "must be an object"),
        ("tools/call", [], -32602, "must be an object"),
    ],
)
def test_requests_that_make_no_sense_are_errors(
    worker: Worker, method: str, params: object, code: int, said: str
) -> None:
    error = worker.wait(worker.send(method, params))["error"]
    assert error["code"] == code
    assert said in error["message"]


def test_the_end_of_stdin_ends_everything(site: Site, proxy: StandInProxy) -> None:
    site.pages["/page"], site.pages["/slow"] = Reply(b"<p>x</p>"), SLOW
    with running_worker(proxy) as worker:
        worker.fetch(site.url("/page"))
        (converter,) = children(worker.process.pid)
        worker.start("web_fetch", {"url": site.url("/slow")}, call_id="left", deadline_s=60, max_text_bytes=65_536)
        begin = time.monotonic()
        assert worker.close() == 0
        assert time.monotonic() - begin < 10
    assert not Path(f"/proc/{converter}").exists()


def test_a_converter_that_dies_is_replaced(site: Site, proxy: StandInProxy) -> None:
    site.pages["/page"] = Reply(b"<p>x</p>")
    with running_worker(proxy) as worker:
        assert worker.fetch(site.url("/page")).text == "x"
        (converter,) = children(worker.process.pid)
        os.kill(converter, signal.SIGKILL)
        endings = [worker.fetch(site.url("/page")) for _ in range(3)]
        assert endings[-1].end == "done"
        assert sum(ending.end == "failed" for ending in endings) <= 1


def test_a_server_that_comes_back_finds_its_calls(site: Site, proxy: StandInProxy) -> None:
    with running_worker(proxy) as worker:
        site.pages["/slow"] = SLOW
        about = {"call_id": "first", "deadline_s": 1, "max_text_bytes": 65_536}
        worker.ask("toolcrib/bind", env={}, limits={}, epoch=1, lease_s=60)
        call = worker.start("web_fetch", {"url": site.url("/slow")}, epoch=1, **about)
        worker.write(b'{"jsonrpc": "2.0", "id": 5, "met\n')  # the dead server was cut off here
        attached = worker.ask("toolcrib/attach", epoch=2, lease_s=60)
        assert attached == {"epoch": 2, "bound": True, "calls": [{"call_id": "first", "state": "running"}]}
        stale = worker.wait(worker.start("web_fetch", {"url": site.url("/slow")}, epoch=1, call_id="stale"))
        assert stale["error"]["data"]["kind"] == "stale_epoch"
        recalled = worker.ask("toolcrib/recall", call_id="first", wait_s=30)
        assert recalled == {"state": "ended", "result": worker.wait(call)["result"]}
        assert worker.ask("toolcrib/recall", call_id="stale") == {"state": "unknown", "seen": False}
        assert worker.ask("toolcrib/output", call_id="first") == {"chunks": [], "next": 0, "lost": 0, "ended": True}


def test_a_call_cancelled_in_the_same_breath_is_answered(site: Site, proxy: StandInProxy) -> None:
    with running_worker(proxy) as worker:
        params = {
            "name": "web_fetch",
            "arguments": {"url": site.url("/")},
            "_meta": {"toolcrib/call": {"call_id": "breath"}},
        }
        call = {"jsonrpc": "2.0", "id": 70, "method": "tools/call", "params": params}
        cancel = {"jsonrpc": "2.0", "id": 71, "method": "toolcrib/cancel", "params": {"call_id": "breath"}}
        worker.write(json.dumps(call).encode() + b"\n" + json.dumps(cancel).encode() + b"\n")
        assert worker.wait(70)["result"]["_meta"]["toolcrib/outcome"]["end"] == "cancelled"
        assert worker.wait(71)["result"] == {"found": True}


def test_a_worker_that_hears_nothing_ends() -> None:
    with running_worker() as worker:
        worker.ask("toolcrib/attach", epoch=1, lease_s=0.5)
        assert worker.process.wait(20) == 0


def test_named_pipes_that_nobody_reads_for_a_while_are_no_end(tmp_path: Path) -> None:
    """As under bubblewrap: the worker's side is open for reading and writing, and its own answers can be read back there."""
    os.mkfifo(tmp_path / "in")
    os.mkfifo(tmp_path / "out")
    ends = [os.open(tmp_path / name, os.O_RDWR) for name in ("in", "out")]
    process = subprocess.Popen(
        command_line("http://127.0.0.1:9"), stdin=ends[0], stdout=ends[1], stderr=subprocess.PIPE
    )
    try:
        for number in range(3):
            os.write(ends[0], json.dumps({"jsonrpc": "2.0", "id": number, "method": "ping"}).encode() + b"\n")
            time.sleep(0.7)
            assert process.poll() is None
        answers = os.read(ends[1], 1 << 16).decode().splitlines()
        assert [json.loads(answer)["id"] for answer in answers] == [0, 1, 2]
    finally:
        process.kill()
        process.communicate()
        for end in ends:
            os.close(end)
