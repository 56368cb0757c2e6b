"""Code that attacks its sandbox: always inside namespaces of its own, with the worker as PID 1, which must survive all of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.workspace.worker_process import WorkerProcess, with_few_processes

pytestmark = pytest.mark.bubblewrap

PROCESSES = "import os\nsorted(int(n) for n in os.listdir('/proc') if n.isdigit())"


def nothing_left(sandbox: WorkerProcess) -> bool:
    """Only the worker and the interpreter run."""
    return len(eval(sandbox.python(PROCESSES).structured["result"])) == 2


def usable(sandbox: WorkerProcess) -> None:
    assert sandbox.python("6 * 7").structured["result"] == "42"
    assert sandbox.shell("echo ok").stdout == "ok\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill(-1, 9)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(1, 2); os.kill(1, 15); os.kill(1, 1); os.kill(1, 19)",
        "import os\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass",
        "import os\nos.closerange(0, 100000)",
        "import os\nos.killpg(0, 9)",
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
        "import os\nkept = [os.open('/dev/null', 0) for _ in range(100000)]",
        "import os\nos.chmod('.', 0)",
        "bytearray(10**12)",
        "kept = []\nwhile True: kept.append(bytearray(16 << 20))",
    ],
)
def test_the_sandbox_survives(sandbox: WorkerProcess, code: str) -> None:
    outcome = sandbox.python(code, deadline_s=15)
    assert outcome.end in ("done", "failed", "crashed", "oom")
    usable(sandbox)


@pytest.mark.parametrize(
    "command", ["kill -9 $PPID; kill -9 1", "kill -9 -1", "kill -9 0", "exec 0<&- 1>&- 2>&-; exec sleep 0.1"]
)
def test_the_sandbox_survives_the_shell(sandbox: WorkerProcess, command: str) -> None:
    assert sandbox.shell(command, deadline_s=15).end in ("done", "failed", "crashed")
    usable(sandbox)
    assert nothing_left(sandbox)


def test_no_descriptor_memory_or_environment_of_the_worker_can_be_opened(sandbox: WorkerProcess) -> None:
    sandbox.shell("sleep 600", background=True)
    code = """\
import os
opened = []
for name in os.listdir('/proc'):
    if not name.isdigit() or int(name) == os.getpid() or 'sleep' in open(f'/proc/{name}/comm').read():
        continue
    for place in ('environ', 'mem', 'maps', *(f'fd/{n}' for n in range(40))):
        try:
            os.close(os.open(f'/proc/{name}/{place}', os.O_RDONLY | os.O_NONBLOCK))
            opened.append(f'{name}/{place}')
        except OSError:
            pass
opened
"""
    assert sandbox.python(code).structured["result"] == "[]"


def test_daemons_do_not_outlive_their_call(sandbox: WorkerProcess) -> None:
    code = """\
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 64)
        time.sleep(600)
    os._exit(0)
'started'
"""
    outcome = sandbox.python(code)
    assert (outcome.end, outcome.structured["result"]) == ("done", "'started'")
    assert nothing_left(sandbox)


def test_a_background_job_keeps_its_daemons_while_calls_end(sandbox: WorkerProcess) -> None:
    job = sandbox.shell("(setsid sleep 600 &) ; sleep 0.1; exit 4", background=True).structured["job_id"]
    read = sandbox.call("shell_read", job_id=job, wait_s=10)
    while read.structured["running"]:
        read = sandbox.call("shell_read", job_id=job, wait_s=10)
    assert read.structured["exit_code"] == 4
    assert sandbox.python("1").end == "done"
    assert sandbox.shell("true").end == "done"
    assert "sleep" in sandbox.shell("cat /proc/[0-9]*/comm").stdout
    assert sandbox.call("shell_kill", job_id=job).end == "done"
    assert "sleep" not in sandbox.shell("cat /proc/[0-9]*/comm").stdout


@pytest.mark.parametrize(
    "code",
    [
        "import os, time\nmade = 0\nwhile made < 2000:\n    try: pid = os.fork()\n    except OSError: break\n    if not pid:\n        time.sleep(60); os._exit(0)\n    made += 1\nmade",
        "import os\nmade = 0\nwhile made < 2000:\n    try: pid = os.fork()\n    except OSError: break\n    if not pid: os._exit(0)\n    made += 1\nmade",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import threading\ngate = threading.Event()\nmade = 0\ntry:\n    while made < 2000:\n        threading.Thread(target=gate.wait, args=(20,), daemon=True).start(); made += 1\nexcept RuntimeError: pass\ngate.set()\nmade",
    ],
    ids=["sleepers", "zombies", "bomb", "threads"],
)
def test_after_a_bomb_there_are_free_processes(tmp_path: Path, code: str) -> None:
    tmp_path.chmod(0o777)
    worker = WorkerProcess(tmp_path, with_few_processes(tmp_path, 60), root="/mnt")
    harmless = "import os, time\nmade = 0\nwhile made < 80:\n    try: pid = os.fork()\n    except OSError: break\n    if not pid:\n        time.sleep(5); os._exit(0)\n    made += 1\nmade"
    made = int(worker.python(harmless).structured["result"])
    assert made < 60, "the limit of processes does not hold here: no bomb is run"
    outcome = worker.python(code, deadline_s=3)
    assert outcome.end in ("done", "failed", "crashed", "deadline")
    usable(worker)
    assert len(eval(worker.python(PROCESSES).structured["result"])) == 2
    assert worker.close() == 0


def test_filling_the_workspace_is_stopped_and_deleting_helps(sandbox: WorkerProcess) -> None:
    code = "import os\nblock = os.urandom(4 << 20)\nprint('begun', flush=True)\nfor n in range(64):\n    open(f'fill{n}', 'wb').write(block)"
    outcome = sandbox.python(code)
    assert (outcome.end, outcome.stdout) == ("disk_full", "begun\n"), outcome
    assert (
        sandbox.refusal(
            "toolcrib/file.write",
            handle=sandbox.result("toolcrib/file.open", path="up", mode="w")["handle"],
            data="eHh4",
        )
        == "too_large"
    )
    assert sandbox.call("file_write", path="more", content="x" * 10_000).end == "disk_full"
    assert sandbox.shell("head -c 8000000 /dev/zero > more").end == "disk_full"
    assert sandbox.shell("rm -f fill* more").end == "done"
    assert sandbox.python("open('small', 'w').write('x' * 1000)").end == "done"


def test_one_huge_file_is_stopped(sandbox: WorkerProcess) -> None:
    assert sandbox.shell("head -c 200000000 /dev/zero > big").end == "disk_full"
    assert sandbox.shell("rm big").end == "done"
    sparse = sandbox.python(
        "import os\nfd = os.open('sparse', os.O_CREAT | os.O_WRONLY)\nos.lseek(fd, 60 << 20, 0); os.write(fd, b'x')"
    )
    assert sparse.end == "done"
    assert sandbox.result("toolcrib/usage")["workspace_bytes"] < 1 << 20


def test_a_full_tmp_is_told_as_a_full_disk(sandbox: WorkerProcess) -> None:
    outcome = sandbox.python(
        "with open('/tmp/fill', 'wb') as f:\n    for _ in range(1000): f.write(bytes(1 << 20))", deadline_s=20
    )
    assert outcome.end == "disk_full"
    assert sandbox.python("import os\nos.remove('/tmp/fill')").end == "done"


def test_endless_printing_is_drained_bounded_and_ended(sandbox: WorkerProcess) -> None:
    outcome = sandbox.python("while True:\n    print('x' * 100_000)", deadline_s=1.5)
    assert outcome.end == "deadline", outcome
    assert outcome.meta["truncated"]["bytes_total"] > 1_000_000
    assert len(outcome.stdout) < 70_000
    memory = int(sandbox.shell("grep VmHWM /proc/1/status").stdout.split()[1])
    assert memory < 60_000
    usable(sandbox)


def test_a_gigabyte_without_a_newline_is_drained(sandbox: WorkerProcess) -> None:
    outcome = sandbox.shell("head -c 1000000000 /dev/zero", deadline_s=60)
    assert outcome.meta["truncated"]["bytes_total"] == 1_000_000_000
    assert "only its first part" in outcome.text
    assert int(sandbox.shell("grep VmHWM /proc/1/status").stdout.split()[1]) < 60_000


def test_symbolic_links_out_of_the_workspace_are_refused_for_all_file_tools(sandbox: WorkerProcess) -> None:
    sandbox.python(
        "import os\nos.symlink('/etc/passwd', 'link')\nos.symlink('/', 'all')\nos.symlink('/tmp', 'tmp')\nopen('mine', 'w').write('mine')"
    )
    for path in (
        "../../etc/passwd",
        "/etc/passwd",
        "link",
        "all/etc/passwd",
        "a/../../etc/passwd",
        "/workspace/../etc/passwd",
        "/workspace-evil/x",
    ):
        outcome = sandbox.call("file_read", path=path)
        assert outcome.end == "invalid", path
        assert outcome.meta["errors"][0]["pointer"] == "/path"
        assert "root:" not in outcome.text
    for path in ("tmp/evil", "all/tmp/evil", "../evil", "/tmp/evil", "link"):
        assert sandbox.call("file_write", path=path, content="evil").end == "invalid", path
    assert sandbox.call("file_move", source="mine", destination="tmp/moved").end == "invalid"
    assert sandbox.call("file_move", source="all/etc/passwd", destination="got").end == "invalid"
    assert sandbox.call("file_list", path="all").end == "invalid"
    assert sandbox.call("file_delete", path="all/tmp", recursive=True).end == "invalid"
    assert "root:" not in sandbox.call("file_search", pattern="root:").text
    assert (
        sandbox.python("import os\n({'evil', 'moved'} & {*os.listdir('/tmp')}, open('mine').read())").structured[
            "result"
        ]
        == "(set(), 'mine')"
    )


def test_a_race_of_renames_never_lets_a_read_out(sandbox: WorkerProcess) -> None:
    setup = "mkdir -p d/real && echo inside > d/real/passwd && ln -s /etc d/link"
    sandbox.shell(setup)
    loop = "import ctypes\nl = ctypes.CDLL(None)\nwhile True: l.renameat2(-100, b'd/real', -100, b'd/link', 2)"
    racing = sandbox.start("python_execute", code=loop, call_id="race")
    ends = {"done": 0, "invalid": 0, "failed": 0}
    for turn in range(30_000):
        if turn >= 1500 and ends["done"] and ends["invalid"]:  # on a busy machine the other one has its turn seldom
            break
        outcome = sandbox.call("file_read", path="d/real/passwd")
        ends[outcome.end] += 1
        assert "root:" not in outcome.text
    assert ends["done"]
    assert ends["invalid"]
    sandbox.result("toolcrib/cancel", call_id="race")
    assert sandbox.finish(racing).end == "cancelled"


def test_many_thousand_files_are_listed_and_counted_in_time(sandbox: WorkerProcess) -> None:
    made = sandbox.python(
        "import os\nos.mkdir('many')\nfor n in range(16_000): open(f'many/{n}', 'w').close()", deadline_s=60
    )
    assert made.end == "done"
    assert made.meta["workspace_changed_more"] is True
    assert len(made.meta["workspace_changed"]) == 1000
    listed = sandbox.result("toolcrib/file.list", path="many", limit=100)
    assert (len(listed["entries"]), listed["truncated"]) == (100, True)
    outcome = sandbox.call("file_list", path="many")
    assert outcome.structured["truncated"] is True
    assert outcome.meta["usage"]["wall_ms"] < 5000
    assert sandbox.result("toolcrib/usage")["workspace_files"] == 16_000
    assert sandbox.call("file_delete", path="many", recursive=True).end == "done"


STUBBORN = {
    "ignores every signal": "trap '' TERM INT HUP QUIT; while :; do sleep 0.1; done",
    "stops itself": "kill -STOP $$",
    "children that ignore and hold the pipes": "for i in 1 2 3; do (trap '' TERM; exec sleep 611) & done; wait",
    "a daemon that floods": "(setsid sh -c 'trap \"\" TERM; exec yes' &); sleep 611",
    "twice forked, pipes held": "( ( setsid sleep 611 & ) & ); sleep 611",
}


@pytest.mark.parametrize("command", STUBBORN.values(), ids=STUBBORN.keys())
def test_a_stubborn_command_ends_at_its_deadline_with_all_it_started(sandbox: WorkerProcess, command: str) -> None:
    begun = time.monotonic()
    outcome = sandbox.shell(f"echo so far; {command}", deadline_s=0.5)
    assert outcome.end == "deadline"
    assert time.monotonic() - begun < 15
    assert outcome.stdout.startswith("so far\n")
    assert nothing_left(sandbox)


LEFT = {
    "a daemon that floods": "(setsid sh -c 'trap \"\" TERM HUP; exec yes' &)",
    "twice forked, pipes held": "( ( setsid sleep 612 & ) & )",
    "stopped": "(sh -c 'kill -STOP $$; sleep 612' &)",
    "a tree that forks on": "(setsid bash -c 'f() { sleep 0.05; f & }; f & sleep 0.3' &)",
}


@pytest.mark.parametrize("command", LEFT.values(), ids=LEFT.keys())
def test_what_a_command_leaves_behind_ends_with_it(sandbox: WorkerProcess, command: str) -> None:
    outcome = sandbox.shell(f"echo begun; {command}")
    assert outcome.end == "done"
    assert outcome.stdout.startswith("begun\n")
    assert nothing_left(sandbox)


def test_a_child_made_beside_its_parent_is_ended_too(sandbox: WorkerProcess) -> None:
    """CLONE_PARENT makes a sibling of the interpreter: a child of the worker that the worker did not start."""
    code = """\
import ctypes, os, platform, time
number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]
pid = ctypes.CDLL(None).syscall(number, 0x8000 | 17, 0, 0, 0, 0)
if pid == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
pid > 0
"""
    assert sandbox.python(code).structured["result"] == "True"
    assert nothing_left(sandbox)
