"""python_execute, python_reset, notebook_export on a plain worker."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WorkerProcess


def test_state_is_kept_and_the_last_expression_is_the_result(worker: WorkerProcess) -> None:
    assert worker.python("import math\nx = 41\ndef f(a):\n    return a + 1").structured["result"] is None
    outcome = worker.python("print('got')\nf(x) + math.floor(0.5)")
    assert (outcome.end, outcome.stdout, outcome.structured["result"]) == ("done", "got\n", "42")
    assert outcome.meta["state"] == "kept"


@pytest.mark.parametrize("code", ["None", "a = 987654", "", "# only a comment", "print()\nNone"])
def test_what_has_no_value_shows_no_result(worker: WorkerProcess, code: str) -> None:
    outcome = worker.python(code)
    assert outcome.end == "done"
    assert outcome.structured["result"] is None


def test_streams_are_told_apart(worker: WorkerProcess) -> None:
    outcome = worker.python("import sys\nprint('OUT')\nprint('ERR', file=sys.stderr)")
    assert (outcome.stdout, outcome.structured["stderr"]) == ("OUT\n", "ERR\n")
    assert "[stderr]\nERR" in outcome.text


def test_output_below_pythons_streams_is_caught_in_order(worker: WorkerProcess) -> None:
    outcome = worker.python(
        "import os, subprocess\nprint('p', end='')\nos.fork() or os._exit(0)\nos.system('echo a')\nos.write(1, b'b\\n')\n"
        "subprocess.run(['sh', '-c', 'echo c; echo d >&2'])\nprint('e')"
    )
    assert outcome.stdout == "pa\nb\nc\ne\n"
    assert outcome.structured["stderr"] == "d\n"


def test_bytes_that_are_no_text_are_escaped_and_flagged(worker: WorkerProcess) -> None:
    outcome = worker.python("import os\nos.write(1, b'A\\xff\\xfe\\x00B')\nNone")
    assert outcome.end == "done"
    assert outcome.stdout == "A\\xff\\xfe\\x00B"
    assert outcome.structured["escaped"] is True
    assert "escaped" not in worker.python("print('ü')").structured


def test_a_traceback_shows_the_users_frames_lines_and_causes(worker: WorkerProcess) -> None:
    code = """\
def one(d):
    return two(d)
def two(d):
    try:
        return int('not a number')
    except ValueError as error:
        raise KeyError('missing') from error
print('said before')
one({})
"""
    outcome = worker.python(code)
    assert (outcome.end, outcome.meta["state"]) == ("failed", "kept")
    for part in (
        "said before",
        "ValueError",
        "KeyError: 'missing'",
        "direct cause",
        "line 7, in two",
        "raise KeyError('missing')",
    ):
        assert part in outcome.text
    assert "sandbox_images" not in outcome.text
    assert outcome.structured["error"]["line"] == 7


def test_endless_recursion_is_a_short_failure(worker: WorkerProcess) -> None:
    plain = worker.python("def again(n):\n    return again(n + 1)\nagain(0)")
    mutual = worker.python("def a():\n    b()\ndef b():\n    a()\na()")
    for outcome in (plain, mutual):
        assert outcome.end == "failed"
        assert "RecursionError" in outcome.text
        assert len(outcome.text) < 20_000
    assert worker.python("6 * 7").structured["result"] == "42"


@pytest.mark.parametrize(
    ("code", "number"),
    [("import sys; sys.exit(73)", 73), ("exit(74)", 74), ("quit(75)", 75), ("raise SystemExit('bye')", 1)],
)
def test_an_exit_ends_the_call_not_the_interpreter(worker: WorkerProcess, code: str, number: int) -> None:
    worker.python("x = 41")
    outcome = worker.python(code)
    assert (outcome.end, outcome.meta["exit_code"]) == ("failed", number)
    assert str(number) in outcome.message
    assert worker.python("x + 1").structured["result"] == "42"


def test_exit_zero_is_done_and_keeps_the_state(worker: WorkerProcess) -> None:
    worker.python("x = 41")
    assert worker.python("import sys\nsys.exit(0)").end == "done"
    assert worker.python("x + 1").structured["result"] == "42"


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("os._exit(5)", "exit code 5"),
        ("os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("os.abort()", "SIGABRT"),
    ],
)
def test_the_death_of_the_interpreter_is_told_at_once(worker: WorkerProcess, code: str, how: str) -> None:
    worker.python("x = 41")
    outcome = worker.python(f"import os\nprint('last words', flush=True)\n{code}")
    assert (outcome.end, outcome.meta["state"]) == ("crashed", "lost")
    assert how in outcome.message
    assert "variables and imports are gone" in outcome.message
    assert outcome.stdout == "last words\n"
    assert outcome.meta["usage"]["wall_ms"] < 8000
    after = worker.python("'x' in globals()")
    assert after.structured["result"] == "False"
    assert "restarted" in after.text
    assert "restarted" not in worker.python("1").text


def test_reading_stdin_ends_at_once(worker: WorkerProcess) -> None:
    outcome = worker.python("name = input('who? ')")
    assert outcome.end == "failed"
    assert "EOFError" in outcome.text
    assert worker.python("import sys\nsys.stdin.read()").structured["result"] == "''"


def test_await_and_asyncio_run_both_work(worker: WorkerProcess) -> None:
    worker.python("import asyncio\nasync def answer():\n    await asyncio.sleep(0.01)\n    return 42")
    assert worker.python("await answer()").structured["result"] == "42"
    assert worker.python("asyncio.run(answer())").structured["result"] == "42"
    assert worker.python("x = await answer()\nx + 1").structured["result"] == "43"
    mixed = worker.python("await answer()\nasyncio.run(answer())")
    assert "await main()" in mixed.text


def test_plain_python_semantics_of_return_in_with_and_try(worker: WorkerProcess) -> None:
    code = """\
import sqlite3
db = sqlite3.connect(':memory:')
db.execute('create table t (x)')
def f():
    with db:
        db.execute('insert into t values (1)')
        for i in range(3):
            try:
                return 'returned'
            except Exception:
                return 'swallowed'
(f(), db.execute('select count(*) from t').fetchone())
"""
    assert worker.python(code).structured["result"] == "('returned', (1,))"


@pytest.mark.parametrize(
    "code", ["x = (", "\tx = 1\n  y = 2", "a\x00b", "ran = 1\nfor i in range(3)\n    print(i)", "x = '\ud800'"]
)
def test_code_that_is_no_python_runs_nothing(worker: WorkerProcess, code: str) -> None:
    outcome = worker.python(code)
    assert outcome.end == "failed"
    assert "Error" in outcome.text
    assert worker.python("'ran' in globals()").structured["result"] == "False"


def test_a_syntax_error_names_its_line(worker: WorkerProcess) -> None:
    outcome = worker.python("ok = 1\nfor i in range(3)\n    print(i)")
    assert "line 2" in outcome.text
    assert outcome.structured["error"]["line"] == 2


def test_a_deadline_interrupts_and_keeps_the_state(worker: WorkerProcess) -> None:
    outcome = worker.python(
        "import time\nstage = 'during'\nprint('partial', flush=True)\ntime.sleep(30)", deadline_s=0.5
    )
    assert (outcome.end, outcome.meta["state"], outcome.stdout) == ("deadline", "kept", "partial\n")
    assert worker.python("stage").structured["result"] == "'during'"


@pytest.mark.parametrize(
    "code",
    [
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "while True:\n    try:\n        __import__('time').sleep(1)\n    except BaseException: pass",
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\ntime.sleep(30)",
    ],
)
def test_what_ignores_the_interrupt_is_killed(worker: WorkerProcess, code: str) -> None:
    outcome = worker.python(code, deadline_s=0.5)
    assert (outcome.end, outcome.meta["state"]) == ("deadline", "lost")
    assert outcome.meta["usage"]["wall_ms"] < 8000
    assert worker.python("6 * 7").structured["result"] == "42"


def test_calls_queue_and_can_be_cancelled_running_or_waiting(worker: WorkerProcess) -> None:
    running = worker.start(
        "python_execute", code="import time\nprint('begun', flush=True)\ntime.sleep(30)", call_id="running"
    )
    while not worker.result("toolcrib/peek", call_id="running")["content"]:
        time.sleep(0.02)
    waiting = worker.start("python_execute", code="open('ran', 'w')", call_id="waiting")
    expiring = worker.start("python_execute", code="open('ran', 'w')", deadline_s=0.2)
    expired = worker.finish(expiring)
    assert (expired.end, expired.meta["state"]) == ("deadline", "kept")
    assert "nothing of it ran" in expired.message
    assert worker.result("toolcrib/peek", call_id="running")["content"][0]["text"] == "begun\n"
    assert worker.result("toolcrib/cancel", call_id="waiting") == {"found": True}
    assert worker.finish(waiting).end == "cancelled"
    assert worker.result("toolcrib/cancel", call_id="running") == {"found": True}
    outcome = worker.finish(running)
    assert (outcome.end, outcome.stdout) == ("cancelled", "begun\n")
    assert worker.result("toolcrib/cancel", call_id="running") == {"found": False}
    assert worker.python("import os\nos.path.exists('ran')").structured["result"] == "False"


def test_cancelling_and_quick_calls_many_times(worker: WorkerProcess) -> None:
    for number in range(15):
        slow = worker.start("python_execute", code="import time\ntime.sleep(30)", call_id=f"slow{number}")
        worker.result("toolcrib/cancel", call_id=f"slow{number}")
        quick = [worker.start("python_execute", code=f"{n} + 0") for n in range(10)]
        assert [worker.finish(q).structured["result"] for q in quick] == [str(n) for n in range(10)]
        assert worker.finish(slow).end == "cancelled"


def test_a_background_child_does_not_hold_up_the_answer_nor_outlive_it(worker: WorkerProcess) -> None:
    code = "import subprocess\np = subprocess.Popen(['sleep', '600'])\nq = subprocess.Popen('setsid sleep 601 & exec sleep 602', shell=True)\nprint('done')"
    outcome = worker.python(code)
    assert (outcome.end, outcome.stdout) == ("done", "done\n")
    assert outcome.meta["usage"]["wall_ms"] < 8000
    assert "left behind" in outcome.text
    assert worker.python("p.poll(), q.poll()").structured["result"] == "(-9, -9)"


def test_children_and_threads_of_all_kinds_can_be_used(worker: WorkerProcess) -> None:
    code = """\
import multiprocessing, threading, concurrent.futures, subprocess
def square(n):
    return n * n
with multiprocessing.get_context('fork').Pool(2) as pool:
    squares = pool.map(square, range(4))
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    threads = list(pool.map(square, range(4)))
(squares, threads, subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout)
"""
    assert worker.python(code).structured["result"] == "([0, 1, 4, 9], [0, 1, 4, 9], 'x\\n')"


def test_a_forked_child_that_runs_off_the_cell_is_no_second_interpreter(worker: WorkerProcess) -> None:
    code = "import os\npid = os.fork()\nif pid:\n    status = os.waitpid(pid, 0)[1]\n    print('child ended', status)\nelse:\n    1 / 0"
    outcome = worker.python(code)
    assert (outcome.end, outcome.stdout) == ("done", "child ended 256\n")
    assert "ZeroDivisionError" in outcome.structured["stderr"]
    assert worker.python("6 * 7").structured["result"] == "42"


def test_replaced_builtins_streams_and_modules_do_not_break_later_calls(worker: WorkerProcess) -> None:
    spoil = """\
import builtins, sys, io, json
x = 41
builtins.print = builtins.open = builtins.repr = None
sys.modules['json'] = None
sys.stdout = io.StringIO()
sys.stderr.close()
sys.stdin = None
"""
    assert worker.python(spoil).end == "done"
    outcome = worker.python("import json\nprint(json.dumps([x + 1]))\nopen('f', 'w').write('w')")
    assert (outcome.end, outcome.stdout, outcome.structured["result"]) == ("done", "[42]\n", "1")
    assert "put back" in outcome.text


def test_closed_descriptors_do_not_break_later_calls(worker: WorkerProcess) -> None:
    assert worker.python("import os\nos.closerange(0, 256)\nx = 41").end in ("done", "failed")
    after = worker.python("print('again')\nx + 1")
    assert (after.stdout, after.structured["result"]) == ("again\n", "42")


def test_closing_the_private_channel_is_a_crash_with_state_lost(worker: WorkerProcess) -> None:
    outcome = worker.python("import os\nos.closerange(0, 5000)")
    assert (outcome.end, outcome.meta["state"]) == ("crashed", "lost")
    assert worker.python("6 * 7").structured["result"] == "42"


def test_an_outcome_can_not_be_forged_for_another_call(worker: WorkerProcess) -> None:
    forge = """\
import os, json, struct, socket
frame = json.dumps({"kind": "done", "nonce": "guess", "status": "ok", "result": "FORGED"}).encode()
wrote = 0
for fd in map(int, os.listdir('/proc/self/fd')):
    try:
        if os.readlink(f'/proc/self/fd/{fd}').startswith('socket'):
            wrote += os.write(fd, struct.pack('>II', len(frame), 0) + frame) > 0
    except OSError:
        pass
wrote
"""
    outcome = worker.python(forge)
    assert (outcome.end, outcome.structured["result"]) == ("done", "1")
    assert "FORGED" not in worker.python("'honest'").text
    damaged = worker.python(forge.replace("struct.pack('>II', len(frame), 0) + frame", "b'x' * 64"))
    assert (damaged.end, damaged.meta["state"]) == ("crashed", "lost")
    assert worker.python("'honest'").structured["result"] == "'honest'"


def test_the_protocols_own_text_in_the_output_is_plain_text(worker: WorkerProcess) -> None:
    line = json.dumps({"jsonrpc": "2.0", "id": 1, "result": {"content": []}})
    assert worker.python(f"print({line!r})").stdout == line + "\n"


def test_workspace_modules_serve_the_user_but_shadow_nothing(worker: WorkerProcess, tmp_path: Path) -> None:
    for name in ("json.py", "sitecustomize.py", "usercustomize.py", "struct.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the workspace')")
    worker.python("import os\nos._exit(1)")
    worker.python("open('mymodule.py', 'w').write('VALUE = 42')")
    outcome = worker.python("import json, mymodule\n(json.dumps([1]), mymodule.VALUE)")
    assert outcome.structured["result"] == "('[1]', 42)"


def test_objects_of_main_can_be_pickled(worker: WorkerProcess) -> None:
    code = "import pickle, sys\nclass C:\n    pass\n(type(pickle.loads(pickle.dumps(C()))) is C, __name__, sys.modules['__main__'].C is C)"
    assert worker.python(code).structured["result"] == "(True, '__main__', True)"


def test_lone_surrogates_fail_the_users_print_alone(worker: WorkerProcess) -> None:
    assert worker.python("print(chr(0xd800))").end == "failed"
    assert worker.python("chr(0xd800)").end == "done"
    assert worker.python("raise KeyboardInterrupt").end == "failed"
    assert worker.python("1").end == "done"


def test_reset_forgets_the_state_and_keeps_files(worker: WorkerProcess) -> None:
    worker.python("x = 41\nf = open('kept.txt', 'w')\nf.write('kept')")
    outcome = worker.call("python_reset")
    assert (outcome.end, outcome.meta["state"]) == ("done", "lost")
    assert worker.python("'x' in globals(), open('kept.txt').read()").structured["result"] == "(False, 'kept')"


def test_a_notebook_of_the_session_is_valid(worker: WorkerProcess, tmp_path: Path) -> None:
    worker.python("print('from-' + 'one')\n6 * 7")
    worker.python("1 / 0")
    worker.call("python_reset")
    outcome = worker.call("notebook_export", path="books/mine.ipynb")
    assert outcome.meta["artifacts"][0]["path"] == "books/mine.ipynb"
    book = json.loads((tmp_path / "books/mine.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    first, second, third = book["cells"]
    assert first["outputs"] == [
        {"output_type": "stream", "name": "stdout", "text": "from-one\n"},
        {"output_type": "execute_result", "execution_count": 1, "data": {"text/plain": "42"}, "metadata": {}},
    ]
    assert second["outputs"][0]["ename"] == "ZeroDivisionError"
    assert third["cell_type"] == "markdown"
    assert len({cell["id"] for cell in book["cells"]}) == 3


def test_what_changed_in_the_workspace_is_named(worker: WorkerProcess, tmp_path: Path) -> None:
    (tmp_path / "old").write_text("1")
    (tmp_path / "gone").write_text("1")
    worker.python("1")
    outcome = worker.python(
        "import os\nos.mkdir('d')\nopen('d/new', 'w').write('x')\nopen('old', 'w').write('22')\nos.remove('gone')\nprint('x' * 100_000)"
    )
    assert outcome.meta["workspace_changed"] == ["d", "d/new", "gone", "old"]
    assert outcome.meta["workspace_changed_more"] is False
    assert worker.python("open('old').read()").meta["workspace_changed"] == []


def test_usage_is_measured(worker: WorkerProcess) -> None:
    usage = worker.python("x = bytearray(50 << 20)\nfor i in range(2_000_000): pass").meta["usage"]
    assert usage["cpu_ms"] > 1
    assert usage["memory_peak_bytes"] > 50 << 20
    assert usage["wall_ms"] > 1
