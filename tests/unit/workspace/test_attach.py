"""What a server finds that comes back after its own death: fence, results, output by offset, lease, frames that were cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WORKER, WorkerProcess


def output(worker: WorkerProcess, call_id: str, **params: object) -> dict[str, object]:
    return worker.result("toolcrib/output", call_id=call_id, **params)


def text_of(answer: dict[str, object], stream: str = "stdout") -> str:
    chunks: list[dict[str, str]] = answer["chunks"]  # type: ignore[assignment]
    return "".join(chunk["text"] for chunk in chunks if chunk["stream"] == stream)


def start(worker: WorkerProcess, code: str, **meta: object) -> int:
    told = {"call_id": "c", "deadline_s": 30, "max_text_bytes": 65_536, **meta}
    return worker.send("tools/call", name="python_execute", arguments={"code": code}, _meta={"toolcrib/call": told})


def test_a_server_that_comes_back_finds_its_calls_and_shuts_out_the_dead_one(worker: WorkerProcess) -> None:
    worker.result("toolcrib/bind", env={}, limits={}, epoch=3, lease_s=60)
    start(worker, "import time; time.sleep(1); 'late'", call_id="running", epoch=3)
    done = start(worker, "print('x')", call_id="queued", epoch=3)
    worker.write(b'{"jsonrpc": "2.0", "id": 99, "method": "tools/ca')  # the dead server was cut off here
    attached = worker.result("toolcrib/attach", epoch=4, lease_s=60)
    assert (attached["epoch"], attached["bound"]) == (4, True)
    assert {call["call_id"]: call["state"] for call in attached["calls"]} == {"running": "running", "queued": "running"}

    late = worker.answer(start(worker, "open('stale', 'w')", call_id="stale", epoch=3))
    assert late["error"]["data"]["kind"] == "stale_epoch"
    untold = worker.answer(start(worker, "open('stale', 'w')", call_id="untold"))
    assert untold["error"]["data"]["kind"] == "stale_epoch"
    assert worker.refusal("toolcrib/attach", epoch=3, lease_s=60) == "stale_epoch"
    assert worker.result("toolcrib/recall", call_id="stale", wait_s=0) == {"state": "unknown", "seen": False}

    assert worker.result("toolcrib/recall", call_id="running", wait_s=0) == {"state": "running"}
    recalled = worker.result("toolcrib/recall", call_id="running", wait_s=30)
    assert recalled["result"]["structuredContent"]["result"] == "'late'"
    first = worker.answer(done)["result"]
    assert worker.result("toolcrib/recall", call_id="queued", wait_s=30) == {"state": "ended", "result": first}
    assert worker.answer(start(worker, "2", call_id="fresh", epoch=4))["result"]["isError"] is False
    assert not (worker.workspace / "stale").exists()


def test_a_call_id_runs_once(worker: WorkerProcess) -> None:
    code = "open('count', 'a').write('x')"
    busy = start(worker, "import time; time.sleep(0.5); " + code)
    assert worker.answer(start(worker, code))["error"]["data"]["kind"] == "call_exists"
    assert worker.answer(busy)["result"]["isError"] is False
    assert worker.answer(start(worker, code))["error"]["data"]["kind"] == "call_exists"
    assert (worker.workspace / "count").read_text() == "x"


def test_a_call_that_was_invalid_may_come_again(worker: WorkerProcess) -> None:
    assert worker.call("file_write", call_id="again", path=1, content="").end == "invalid"
    assert worker.result("toolcrib/recall", call_id="again")["state"] == "ended"
    assert worker.call("file_write", call_id="again", path="f", content="").end == "done"
    assert worker.result("toolcrib/recall", call_id="again")["result"]["isError"] is False
    assert worker.refusal(
        "tools/call", name="file_list", arguments={}, _meta={"toolcrib/call": {"call_id": "again"}}
    ) == ("call_exists")


def test_the_last_results_are_kept_and_the_oldest_go_first(worker: WorkerProcess) -> None:
    big = "x" * 250_000
    for number in range(70):
        worker.call("python_execute", call_id=f"c{number}", code=f"print('{big}')", max_text_bytes=1 << 20)
    states = [worker.result("toolcrib/recall", call_id=f"c{number}")["state"] for number in range(70)]
    assert states == sorted(states, reverse=True)  # unknown ones, then ended ones
    assert 30 < states.count("ended") < 64  # 16 MiB of them
    assert worker.refusal("toolcrib/output", call_id="c0") == "not_found"
    for number in range(300):
        worker.call("file_read", call_id=f"s{number}", path="nothing")
    states = [worker.result("toolcrib/recall", call_id=f"s{number}")["state"] for number in range(300)]
    assert states.count("ended") >= 64
    assert worker.answer(start(worker, "1", call_id="c0"))["error"]["data"]["kind"] == "call_exists"


def test_output_is_told_in_order_as_it_comes_and_after_the_end(worker: WorkerProcess) -> None:
    command = "echo one; sleep 0.3; echo two >&2; sleep 0.3; echo three"
    number = worker.start("shell_execute", call_id="c", command=command)
    seen, at, ended = [], 0, False
    while not ended:
        answer = output(worker, "c", offset=at, wait_s=20)
        assert answer["lost"] == 0
        seen += [(chunk["stream"], chunk["text"]) for chunk in answer["chunks"]]  # type: ignore[attr-defined]
        at, ended = int(str(answer["next"])), bool(answer["ended"])
    expected = [("stdout", "one\n"), ("stderr", "two\n"), ("stdout", "three\n")]
    assert seen == expected
    worker.finish(number)
    again = output(worker, "c", offset=0)
    assert [(chunk["stream"], chunk["text"]) for chunk in again["chunks"]] == expected  # type: ignore[attr-defined]
    assert (again["next"], again["ended"]) == (14, True)
    assert output(worker, "c", offset=4, max_bytes=4)["chunks"] == [{"stream": "stderr", "text": "two\n", "end": 8}]
    assert output(worker, "c", offset=99) == {"chunks": [], "next": 99, "lost": 0, "ended": True}


def test_waiting_for_output_ends_in_time(worker: WorkerProcess) -> None:
    number = worker.start("shell_execute", call_id="c", command="sleep 1")
    assert output(worker, "c", offset=0, wait_s=0.1) == {"chunks": [], "next": 0, "lost": 0, "ended": False}
    assert output(worker, "c", offset=0, wait_s=30)["ended"] is True
    worker.finish(number)
    assert worker.refusal("toolcrib/output", call_id="other") == "not_found"
    bad: tuple[dict[str, object], ...] = (
        {"offset": -1},
        {"offset": "x"},
        {"wait_s": float("nan")},
        {"max_bytes": []},
        {"call_id": 5},
    )
    for wrong in bad:
        answer = worker.request("toolcrib/output", **{"call_id": "c", **wrong})
        assert answer["error"]["code"] == -32602, wrong


def test_only_the_last_mebibyte_of_a_flood_is_kept(worker: WorkerProcess) -> None:
    worker.shell("yes 0123456 | head -c 5000000", call_id="c")
    answer = output(worker, "c", offset=100)
    lost = int(str(answer["lost"]))
    assert 3_700_000 < lost <= 5_000_000 - (1 << 20) - 100
    text, at = text_of(answer), int(str(answer["next"]))
    while not answer["ended"]:
        answer = output(worker, "c", offset=at, max_bytes=1 << 20)
        text, at = text + text_of(answer), int(str(answer["next"]))
    assert at == 5_000_000
    assert text == ("0123456\n" * 625_000)[100 + lost :]


def test_characters_are_never_split(worker: WorkerProcess) -> None:
    code = """\
import os, time
for byte in 'aé€😀'.encode():
    os.write(1, bytes([byte])); os.write(2, b'.'); time.sleep(0.03)
os.write(1, b'\\xe2\\x82')
time.sleep(0.3)
"""
    number = worker.start("python_execute", call_id="c", code=code)
    text, at, ended = "", 0, False
    while not ended:
        answer = output(worker, "c", offset=at, wait_s=20, max_bytes=1)
        text, at, ended = text + text_of(answer), int(str(answer["next"])), bool(answer["ended"])
    assert text == "aé€😀\\xe2\\x82"
    worker.finish(number)


def test_a_worker_that_hears_nothing_ends_with_all_it_started(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path)
    worker.result("toolcrib/bind", env={}, limits={}, lease_s=1.5)
    worker.start("shell_execute", command="echo $$ > pid; exec sleep 600")
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        worker.result("ping")  # it lives while it is heard
        time.sleep(0.2)
    pid = int((tmp_path / "pid").read_text())
    assert worker.process.wait(20) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    worker.close()


@pytest.mark.parametrize("lease", [0, -1, "x", True])
def test_a_lease_must_be_a_time(worker: WorkerProcess, lease: object) -> None:
    assert worker.request("toolcrib/attach", epoch=1, lease_s=lease)["error"]["code"] == -32602


def test_a_worker_that_nobody_reads_goes_on_and_drops_whole_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(WORKER), "--workspace", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def send(number: int, method: str, **params: object) -> None:
            assert process.stdin is not None
            message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()

        code = "print('x' * 3_000_000)\nopen(f'ran{n}', 'w').close()"
        for number in range(16):
            meta = {"toolcrib/call": {"call_id": f"c{number}", "deadline_s": 60, "max_text_bytes": 1 << 22}}
            arguments = {"code": code.replace("{n}", str(number)).replace("f'", "'")}
            send(number, "tools/call", name="python_execute", arguments=arguments, _meta=meta)
        until = time.monotonic() + 60
        while not (tmp_path / "ran15").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        time.sleep(0.3)
        process.stdin.write(b"\n")
        send(100, "toolcrib/attach", epoch=1, lease_s=60)
        answers = {}
        while 100 not in answers:
            message = json.loads(process.stdout.readline())  # each line is whole, whatever was dropped between
            answers[message["id"]] = message
        assert 4 < len(answers) < 17
        send(101, "toolcrib/recall", call_id="c0", wait_s=0)
        assert json.loads(process.stdout.readline())["result"]["state"] in ("ended", "unknown")
        send(102, "toolcrib/recall", call_id="c15", wait_s=0)
        assert json.loads(process.stdout.readline())["result"]["result"]["isError"] is False
        process.stdin.close()
        assert process.wait(20) == 0


@pytest.mark.parametrize("image", ["workspace", "web"])
def test_a_stdin_that_can_not_be_waited_for_is_refused_in_a_sentence(image: str, tmp_path: Path) -> None:
    script = WORKER.parents[1] / image / "worker.py"
    arguments = ["--workspace", str(tmp_path)] if image == "workspace" else []
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("stdin must be a pipe, a socket or a terminal\n")
    assert "Traceback" not in done.stderr
