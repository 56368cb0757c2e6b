"""shell_execute, shell_read, shell_write, shell_kill on a plain worker."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WorkerProcess


def alive(mark: str) -> bool:
    return subprocess.run(["pgrep", "-f", mark], stdout=subprocess.DEVNULL, check=False).returncode == 0


def wait_gone(mark: str) -> None:
    until = time.monotonic() + 10
    while alive(mark):
        assert time.monotonic() < until, f"{mark} is still running"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("echo said; exit 3", 3),
        ("false", 1),
        ("exit 137", 137),
        ("sh -c 'kill -9 $$'; exit $?", 137),
        ("no-such-x", 127),
    ],
)
def test_an_exit_code_is_a_failure_with_the_output_kept(worker: WorkerProcess, command: str, code: int) -> None:
    outcome = worker.shell(command)
    assert (outcome.end, outcome.meta["exit_code"], outcome.structured["exit_code"]) == ("failed", code, code)
    assert str(code) in outcome.message
    assert code != 3 or outcome.stdout == "said\n"


@pytest.mark.parametrize("command", ["true", "", "   ", "# comment", "cat <<E\nx\nE"])
def test_harmless_lines_succeed(worker: WorkerProcess, command: str) -> None:
    assert worker.shell(command).end == "done"


def test_an_unclosed_quote_is_a_failure_at_once(worker: WorkerProcess) -> None:
    outcome = worker.shell("echo 'open")
    assert outcome.end == "failed"
    assert outcome.structured["stderr"]


def test_a_command_ended_by_a_signal_names_it(worker: WorkerProcess) -> None:
    outcome = worker.shell("echo before; kill -TERM $$")
    assert (outcome.end, outcome.meta["exit_code"], outcome.meta["signal"]) == ("crashed", 143, "SIGTERM")
    assert outcome.stdout == "before\n"


def test_streams_quotes_and_unicode(worker: WorkerProcess) -> None:
    outcome = worker.shell("""printf 'b\\na\\n' | sort | tr '\\n' '-'; echo "ü $((6 * 7))" '$x'; echo ERR >&2""")
    assert (outcome.stdout, outcome.structured["stderr"]) == ("a-b-ü 42 $x\n", "ERR\n")


@pytest.mark.parametrize("command", ["cat", "read x", "python3", "head -c1 | wc -c", "less /dev/null", "git commit"])
def test_stdin_is_empty_and_closed(worker: WorkerProcess, command: str) -> None:
    outcome = worker.shell(f"{command}; echo after", deadline_s=20)
    assert outcome.end == "done"
    assert outcome.stdout.endswith("after\n")


def test_stdin_can_be_given(worker: WorkerProcess) -> None:
    assert worker.shell("tr a-z A-Z", stdin="text ü\n").stdout == "TEXT ü\n"


def test_git_neither_pages_nor_edits(worker: WorkerProcess) -> None:
    setup = "git init -q . && git config user.email a@b && git config user.name n && for i in $(seq 60); do git commit -q --allow-empty -m c$i; done"
    assert worker.shell(setup).end == "done"
    assert worker.shell("git log | grep -c commit").stdout == "60\n"
    assert worker.shell("git commit --allow-empty", deadline_s=15).end == "failed"
    assert worker.shell("echo ok").stdout == "ok\n"


def test_a_quiet_command_is_left_alone(worker: WorkerProcess) -> None:
    assert worker.shell("sleep 2; echo ok").stdout == "ok\n"


def test_the_folder_and_the_environment(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    worker.result("toolcrib/bind", env={"COLOUR": "blau"}, limits={})
    assert worker.shell("pwd; echo $COLOUR", cwd="sub").stdout == f"{tmp_path}/sub\nblau\n"
    assert worker.python("import os\nos.environ['COLOUR']").structured["result"] == "'blau'"
    worker.python("os._exit(0)")
    assert worker.python("import os\nos.environ['COLOUR']").structured["result"] == "'blau'"
    for odd in ("../x", "/etc", "missing"):
        assert worker.shell("pwd", cwd=odd).end in ("invalid", "failed")
    (tmp_path / "file").write_text("")
    assert worker.shell("pwd", cwd="file").end == "invalid"


def test_left_over_children_neither_hold_up_nor_outlive_the_call(worker: WorkerProcess) -> None:
    outcome = worker.shell("sleep 700.1 & setsid sleep 700.2 & (setsid sh -c 'sleep 700.3 & exit' &) ; echo started")
    assert (outcome.end, outcome.stdout) == ("done", "started\n")
    assert outcome.meta["usage"]["wall_ms"] < 8000
    wait_gone("sleep 700")


def test_a_deadline_ends_the_whole_subtree(worker: WorkerProcess) -> None:
    outcome = worker.shell(
        "trap '' TERM; echo begun; setsid sleep 701.1 & sleep 701.2 | sleep 701.3; sleep 701.4", deadline_s=0.5
    )
    assert (outcome.end, outcome.stdout) == ("deadline", "begun\n")
    assert outcome.meta["usage"]["wall_ms"] < 10_000
    wait_gone("sleep 701")


def test_many_at_once_answer_each_with_its_own_code(worker: WorkerProcess) -> None:
    calls = [worker.start("shell_execute", command=f"sleep 0.1; exit {40 + n}") for n in range(12)]
    assert [worker.finish(call).meta["exit_code"] for call in calls] == [40 + n for n in range(12)]


def test_long_output_is_bounded(worker: WorkerProcess, tmp_path: Path) -> None:
    outcome = worker.shell("seq 1 200000")
    assert outcome.meta["truncated"]["bytes_total"] == 1_288_895
    assert len(outcome.stdout) < 70_000
    assert (tmp_path / outcome.meta["truncated"]["artifact"]).stat().st_size == 1_288_895


def test_a_background_job_is_read_written_and_killed(worker: WorkerProcess) -> None:
    started = worker.shell("echo one; sleep 0.5; echo two; setsid sleep 702.1 & exec sleep 702.2", background=True)
    job = started.structured["job_id"]
    assert started.structured["running"] is True
    said = ""
    while "two" not in said:
        said += worker.call("shell_read", job_id=job, wait_s=5).structured["stdout"]
    assert said == "one\ntwo\n"
    assert worker.shell("true").end == "done"
    assert worker.python("1").end == "done"
    assert alive("sleep 702.1")
    assert alive("sleep 702.2")
    killed = worker.call("shell_kill", job_id=job)
    assert killed.structured["running"] is False
    wait_gone("sleep 702")
    assert worker.call("shell_kill", job_id=job).end == "done"
    assert worker.call("shell_read", job_id="job-99").end == "failed"


def test_a_job_reads_what_is_written(worker: WorkerProcess) -> None:
    job = worker.shell('while read line; do echo "got <$line>"; done; exit 5', background=True).structured["job_id"]
    assert worker.call("shell_write", job_id=job, input="hello ü\n").end == "done"
    assert worker.call("shell_read", job_id=job, wait_s=10).structured["stdout"] == "got <hello ü>\n"
    worker.call("shell_write", job_id=job, input="", eof=True)
    until = time.monotonic() + 10
    while (read := worker.call("shell_read", job_id=job, wait_s=5)).structured["running"]:
        assert time.monotonic() < until
    assert read.structured["exit_code"] == 5
    assert worker.call("shell_write", job_id=job, input="late").end == "failed"


def test_waiting_for_a_quiet_job_ends_in_time_and_can_be_cancelled(worker: WorkerProcess) -> None:
    job = worker.shell("sleep 703", background=True).structured["job_id"]
    quiet = worker.call("shell_read", job_id=job, wait_s=0.3)
    assert (quiet.end, quiet.structured["stdout"], quiet.structured["running"]) == ("done", "", True)
    waiting = worker.start("shell_read", job_id=job, wait_s=60, call_id="waiting")
    worker.result("toolcrib/cancel", call_id="waiting")
    assert worker.finish(waiting).end == "cancelled"
    worker.call("shell_kill", job_id=job, force=True)


def test_the_end_of_stdin_ends_everything(tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path)
    worker.shell("setsid sleep 704.1 & exec sleep 704.2", background=True)
    worker.start("python_execute", code="import subprocess\nsubprocess.run(['sleep', '704.3'])")
    worker.start("shell_execute", command="sleep 704.4")
    worker.result("ping")
    assert worker.close() == 0
    wait_gone("sleep 704")
