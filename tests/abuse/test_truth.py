"""What a caller is told of an end is true: which limit was met, who ended what, and what is left of it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.abuse.arena import Arena, code_of

FEW = pytest.mark.parametrize("arena", [{"pids": 48}], indirect=True)
FORKS = """\
import os, time
made = []
try:
    for _ in range(400):
        pid = os.fork()
        if not pid:
            time.sleep(60)
            os._exit(0)
        made.append(pid)
except OSError:
    made.append(0)
"""
THREADS = """\
import threading
gate = threading.Event()
try:
    for _ in range(400):
        threading.Thread(target=gate.wait, args=(20,), daemon=True).start()
finally:
    gate.set()
"""


def outcome(arena: Arena, answer: Any) -> dict[str, Any]:
    body = answer.json()
    return dict(body["detail"] if answer.status_code >= 400 else body)


@FEW
def test_the_limit_of_processes_is_told_and_the_next_call_works(arena: Arena) -> None:
    # without a cgroup of its own nothing counts what was refused
    counted = not arena.server.on_gvisor and (arena.server.runtime == "docker" or os.geteuid() == 0)
    swallowed = outcome(arena, arena.python(FORKS))
    raised = arena.python(THREADS)
    # on gVisor threads are not the host's; at the limit there it ends as a whole, and the sandbox with it
    assert code_of(raised) in ("tool_failed", *(("tool_crashed", "") if arena.server.on_gvisor else ()))
    shell = outcome(arena, arena.shell(f"python3 -c '{FORKS}'"))
    if counted:
        assert swallowed["limits_hit"] == ["pids"]
        assert "48 processes" in str(swallowed["content"])
        assert outcome(arena, raised)["limits_hit"] == ["pids"]
        assert "48 processes" in outcome(arena, raised)["message"]
        assert shell["limits_hit"] == ["pids"]
    quiet = outcome(arena, arena.python("2 + 2"))
    assert "limits_hit" not in quiet
    assert not [line for line in arena.processes() if "sleep" in line]


@pytest.mark.parametrize("arena", [{"memory_mb": 128}], indirect=True)
def test_a_child_that_was_killed_for_memory_is_told_to_the_parent_that_lived(arena: Arena) -> None:
    if arena.server.runtime == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("without root bubblewrap's sandboxes have no control group")
    # none of them alone is too large: under bubblewrap a single process would be refused the memory before that
    child = "import time; kept = b'x' * (80 << 20); time.sleep(3)"
    code = f"import subprocess, sys\nmany = [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range(3)]\nmin(one.wait() for one in many)"
    told = outcome(arena, arena.python(code))
    if arena.server.on_gvisor:  # the host sees one process, which is the sandbox
        assert (told["code"], told["state"], told["sandbox_end"]) == ("oom_killed", "lost", "oom")
        return
    assert told["limits_hit"] == ["memory"]
    assert told["state"] == "kept"
    assert told["structured"]["result"] == "-9"
    killed = arena.python("import os\nos.kill(os.getpid(), 9)")
    assert code_of(killed) == "tool_crashed"  # the same signal, but nothing ran out
    assert "limits_hit" not in outcome(arena, killed)
    assert outcome(arena, killed)["state"] == "lost"


@pytest.mark.parametrize("arena", [{"disk_mb": 32}], indirect=True)
def test_one_file_too_large_is_not_called_a_full_disk(arena: Arena) -> None:
    code = "with open('big', 'wb') as f:\n    f.seek(40 << 20)\n    f.write(b'x')"
    answer = arena.python(code)
    assert code_of(answer) == "disk_full"
    assert outcome(arena, answer)["limits_hit"] == ["file_size"]
    assert "32 MiB" in outcome(arena, answer)["message"]
    answer = arena.shell("truncate -s 0 big; dd if=/dev/zero of=big bs=1M seek=40 count=1; echo $?; kill -XFSZ $$")
    assert code_of(answer) == "disk_full"
    pretended = arena.shell("exit 153")
    assert code_of(pretended) == "tool_failed"
    assert "limits_hit" not in outcome(arena, pretended)
    answer = arena.shell("rm -f big; head -c 3000000 /dev/urandom > small")
    assert answer.status_code == 200


def test_a_full_tmp_is_named(arena: Arena) -> None:
    answer = arena.python("with open('/tmp/fill', 'wb') as f:\n    for _ in range(4000): f.write(bytes(1 << 20))")
    assert code_of(answer) == "disk_full"
    assert outcome(arena, answer)["message"].startswith("/tmp has no room left.")
    answer = arena.shell("echo more > /tmp/more")
    assert "/tmp has no room left" in answer.text
    assert arena.shell("rm /tmp/fill; echo more > /tmp/more").status_code == 200


@pytest.mark.parametrize("arena", [{"cpus": 1}], indirect=True)
def test_programs_see_the_processors_of_their_session(arena: Arena) -> None:
    code = """\
import concurrent.futures, multiprocessing, os, subprocess, sys
pool = concurrent.futures.ThreadPoolExecutor()
ask = 'import os, multiprocessing as m; print(os.cpu_count(), m.cpu_count(), len(os.sched_getaffinity(0)))'
child = subprocess.run([sys.executable, '-c', ask], capture_output=True, text=True).stdout.split()
import numpy
before = len(os.listdir('/proc/self/task'))
numpy.ones((400, 400)) @ numpy.ones((400, 400))
threads = len(os.listdir('/proc/self/task')) - before
(os.cpu_count(), multiprocessing.cpu_count(), len(os.sched_getaffinity(0)), pool._max_workers, child, threads)
"""
    answer = arena.python(code)
    assert answer.json()["structured"]["result"] == "(1, 1, 1, 5, ['1', '1', '1'], 0)", answer.text
    assert (
        arena.shell("nproc; python3 -c 'import os; print(os.cpu_count())'").json()["structured"]["stdout"] == "1\n1\n"
    )
