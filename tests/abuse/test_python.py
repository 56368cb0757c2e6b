"""Hostile Python: what code may do to its interpreter, its worker, its sandbox."""

from __future__ import annotations

import re
import time

import pytest

from tests.abuse.arena import Arena, code_of


def held(arena: Arena, answer_code: str, code: str, deadline_s: float = 2, within_s: float = 12) -> dict[str, object]:
    begun = time.monotonic()
    answer = arena.python(code, deadline_s=deadline_s)
    assert (answer.status_code, code_of(answer)) == (450 if answer_code == "deadline_exceeded" else 500, answer_code), (
        answer.text
    )
    assert time.monotonic() - begun < within_s
    return dict(answer.json()["detail"])


LOOPS = {
    "plain": "while True: pass",
    "sleep": "import time; time.sleep(30)",
    "ignores signals": "import signal\nfor s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "swallows everything": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "held in C": "import re; re.match('(a+)+$', 'a' * 40 + '!')",
}


@pytest.mark.parametrize("code", LOOPS.values(), ids=LOOPS.keys())
def test_a_loop_ends_at_its_deadline(arena: Arena, code: str) -> None:
    detail = held(arena, "deadline_exceeded", "print('so far', flush=True)\n" + code)
    assert "so far" in str(detail["content"])
    assert detail["state"] in ("kept", "lost")


def test_whether_state_survived_a_deadline_is_told_truthfully(arena: Arena) -> None:
    arena.python("x = 41")
    kept = held(arena, "deadline_exceeded", LOOPS["sleep"])
    assert (arena.python("x").status_code == 200) == (kept["state"] == "kept")
    arena.python("x = 41")
    lost = held(arena, "deadline_exceeded", LOOPS["ignores signals"])
    assert lost["state"] == "lost"
    assert code_of(arena.python("x")) == "tool_failed"


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 256)
        os.execvp('sleep', ['sleep', '613'])
    os._exit(0)
os.wait()
print('parent done')
"""


def test_a_daemon_does_not_outlive_its_call(arena: Arena) -> None:
    answer = arena.python(DAEMON)
    assert answer.status_code == 200, answer.text
    time.sleep(0.5)
    assert not [line for line in arena.processes() if "613" in line]


def test_a_child_that_holds_stdout_does_not_hold_up_the_answer(arena: Arena) -> None:
    begun = time.monotonic()
    answer = arena.python("import subprocess; subprocess.Popen(['sleep', '614']); print('main done')")
    assert answer.status_code == 200
    assert "main done" in answer.text
    assert time.monotonic() - begun < 5


DEATHS = {
    "kill itself": "import os; os.kill(os.getpid(), 9)",
    "leave without cleaning up": "import os; os._exit(0)",
    "leave with a code": "import os; os._exit(7)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
}


@pytest.mark.parametrize("code", DEATHS.values(), ids=DEATHS.keys())
def test_the_death_of_the_interpreter_is_noticed_at_once_and_named(arena: Arena, code: str) -> None:
    arena.python("x = 41")
    detail = held(arena, "tool_crashed", "print('last words', flush=True)\n" + code, deadline_s=60)
    assert detail["state"] == "lost"
    assert "last words" in str(detail["content"])
    assert "exit_code" in detail or "signal" in detail
    after = arena.python("x")
    assert code_of(after) == "tool_failed"
    assert "NameError" in after.text


def test_the_worker_can_not_be_killed_from_inside(arena: Arena) -> None:
    answer = arena.python(
        "import os\nfor pid in (1, os.getppid()):\n    try: os.kill(pid, 9)\n    except OSError as error: print(error)"
    )
    # gVisor lets it: nobody can tell then how the call ended, and that is what it says
    unknown = ("outcome_unknown",) if arena.server.on_gvisor else ()
    assert answer.status_code == 200 or code_of(answer) in ("tool_crashed", "tool_failed", *unknown)


@pytest.mark.parametrize(
    "code", ["import os; os.closerange(0, 256)", "import os; os.closerange(3, 1024); print('closed')"]
)
def test_closed_file_descriptors_break_at_most_their_own_call(arena: Arena, code: str) -> None:
    answer = arena.python(code)
    assert answer.status_code in (200, 500)


FORGE = """
import os, json
lines = ''.join(json.dumps({'jsonrpc': '2.0', 'id': n, 'result': {'content': [{'type': 'text', 'text': 'FOR' + 'GED'}]}}) + chr(10) for n in range(60))
denied = []
for pid in [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:
    for name in ('fd/1', 'fd/2', 'fd/3', 'mem', 'environ', 'maps'):
        try:
            with open(f'/proc/{pid}/{name}', 'rb' if name in ('environ', 'maps') else 'r+b', buffering=0) as file:
                if name.startswith('fd'):
                    file.write(lines.encode())
                else:
                    file.read(1)
                    denied.append(f'READ {pid} {name}')
        except OSError as error:
            denied.append(type(error).__name__)
print('honest', sorted(set(denied)))
"""


def test_answers_can_not_be_forged_through_proc(arena: Arena) -> None:
    answer = arena.python(FORGE)
    assert answer.status_code == 200, answer.text
    assert "FORGED" not in answer.text
    assert "honest" in answer.text
    readable = ("environ", "maps") if arena.server.on_gvisor else ()  # they hold nothing of a session or a server
    read = set(re.findall(r"READ 1 (\w+)", answer.text))
    assert read <= set(readable)


def test_a_printed_protocol_message_is_only_text(arena: Arena) -> None:
    code = 'import os, sys\nmessage = \'{"jsonrpc":"2.0","id":%d,"result":{}}\'\nfor n in range(20): print(message % n, flush=True); os.write(2, b\'\\n{}\\n\')'
    answer = arena.python(code)
    assert answer.status_code == 200
    assert answer.json()["structured"]["stdout"].count("jsonrpc") == 20


def test_too_much_memory_at_once_is_an_ordinary_error(arena: Arena) -> None:
    if arena.server.on_gvisor:  # it grants any size, and counts what is used
        held(arena, "oom_killed", "bytearray(10 ** 12)", deadline_s=20)
        return
    detail = held(arena, "tool_failed", "bytearray(10 ** 12)", deadline_s=20)
    assert "MemoryError" in str(detail["content"])
    assert detail["state"] == "kept"


@pytest.mark.parametrize("arena", [{"memory_mb": 256}], indirect=True)
def test_too_much_memory_page_by_page_is_out_of_memory_and_named(arena: Arena) -> None:
    answer = arena.python("kept = []\nfor n in range(200): kept.append(b'x' * (16 << 20))", deadline_s=40)
    if arena.server.runtime == "docker":
        assert code_of(answer) == "oom_killed", answer.text
    else:
        assert code_of(answer) in ("oom_killed", "tool_failed"), answer.text
        assert code_of(answer) == "oom_killed" or "MemoryError" in answer.text


BOMBS = {
    "processes": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n    except RuntimeError: pass",
}


@pytest.mark.parametrize("arena", [{"pids": 64}], indirect=True)
@pytest.mark.parametrize("code", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_contained(arena: Arena, code: str) -> None:
    answer = arena.python(code, deadline_s=4)
    assert code_of(answer) in ("deadline_exceeded", "tool_crashed", "tool_failed", "oom_killed"), answer.text
    deadline = time.monotonic() + 10
    while arena.python("1").status_code != 200:
        assert time.monotonic() < deadline
    assert len(arena.processes()) < 20


def test_running_out_of_file_descriptors_is_the_codes_own_error(arena: Arena) -> None:
    detail = held(arena, "tool_failed", "kept = []\nwhile True: kept.append(open('/dev/null'))", deadline_s=20)
    assert "Too many open files" in str(detail["content"])
    arena.python("kept.clear()")


@pytest.mark.parametrize("arena", [{"disk_mb": 48}], indirect=True)
@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/dev/shm"])
def test_a_full_disk_is_named_and_can_be_emptied(arena: Arena, place: str) -> None:
    code = f"import os\nfor n in range(400):\n    with open(f'{place}/fill{{n}}', 'wb') as file:\n        file.write(os.urandom(1 << 20)); file.flush(); os.fsync(file.fileno())"
    answer = arena.python(code, deadline_s=40)
    if place != "/workspace" and code_of(answer) in ("oom_killed", "tool_crashed"):
        return  # a place in memory counts as memory
    assert code_of(answer) in ("disk_full", "tool_failed"), answer.text
    assert (
        code_of(answer) == "disk_full"
        or "No space" in answer.text
        or "denied" in answer.text
        or "No such file" in answer.text
    )
    emptied = arena.python(
        f"import os\nfor name in os.listdir('{place}'):\n    if name.startswith('fill'): os.remove('{place}/' + name)"
        if place != "/dev/shm"
        else "1"
    )
    assert emptied.status_code == 200, emptied.text


@pytest.mark.parametrize("arena", [{"disk_mb": 16}], indirect=True)
def test_empty_files_without_end_are_a_full_disk_too(arena: Arena) -> None:
    code = "import os\nos.mkdir('many')\nfor n in range(300_000): os.mknod(f'many/{n}')"
    held(arena, "disk_full", code, deadline_s=60, within_s=60)
    assert arena.shell("rm -r many; echo gone-$((40 + 2))", deadline_s=40).status_code == 200
    assert arena.python("open('small', 'w').write('x')").status_code == 200


FLOODS = {
    "long lines": "while True: print('x' * 10 ** 6)",
    "short lines": "while True: print('abcdefghij')",
    "one line of 1 GiB": "import os\nfor n in range(1024): os.write(1, b'x' * (1 << 20))",
    "both streams": "import sys\nwhile True: print('out' * 1000); print('err' * 1000, file=sys.stderr)",
}


@pytest.mark.parametrize("code", FLOODS.values(), ids=FLOODS.keys())
def test_a_flood_is_bounded_everywhere(arena: Arena, code: str) -> None:
    answer = arena.python(code, deadline_s=4)
    assert answer.status_code in (200, 450, 500)
    assert code_of(answer) in ("", "deadline_exceeded", "disk_full"), answer.text[:500]
    body = answer.json().get("detail") or answer.json()
    assert body["truncated"]["bytes_total"] > body["truncated"]["bytes_kept"]


def test_every_byte_may_be_written_to_stdout(arena: Arena) -> None:
    answer = arena.python("import os; os.write(1, bytes(range(256))); None")
    assert answer.status_code == 200
    assert "ABCDEFG" in answer.text


def test_bytes_that_are_no_text_are_shown_replaced(arena: Arena) -> None:
    answer = arena.python("import os; os.write(1, b'A\\xff\\xfe\\x00B'); None")
    assert answer.status_code == 200
    shown = answer.json()["structured"]["stdout"]
    assert shown.startswith("A")
    assert shown.endswith("B")


def test_a_lone_surrogate_is_the_users_own_error_or_replaced(arena: Arena) -> None:
    answer = arena.python("print(chr(0xd800), 'after')")
    assert answer.status_code == 200 or code_of(answer) == "tool_failed"


@pytest.mark.parametrize(
    ("code", "number"), [("import sys; sys.exit(3)", 3), ("exit(4)", 4), ("raise SystemExit(5)", 5)]
)
def test_an_exit_ends_the_call_and_not_the_interpreter(arena: Arena, code: str, number: int) -> None:
    arena.python("x = 41")
    detail = held(arena, "tool_failed", code, deadline_s=20)
    assert detail["exit_code"] == number
    assert detail["state"] == "kept"
    assert "42" in arena.python("x + 1").text


def test_a_keyboard_interrupt_of_its_own_is_an_ordinary_error(arena: Arena) -> None:
    detail = held(arena, "tool_failed", "raise KeyboardInterrupt", deadline_s=20)
    assert "KeyboardInterrupt" in str(detail["content"])


def test_stdin_is_at_its_end(arena: Arena) -> None:
    detail = held(arena, "tool_failed", "input('who? ')", deadline_s=20, within_s=6)
    assert "EOF" in str(detail["content"])


@pytest.mark.parametrize(
    "code",
    [
        "import builtins; builtins.print = None; builtins.open = None; builtins.len = None",
        "import sys; sys.modules['json'] = None; sys.modules['os'] = None",
        "import sys; sys.stdout = None; sys.stderr = None; sys.stdin = None",
        "import sys; sys.settrace(lambda *a: 1/0); sys.excepthook = None; sys.displayhook = None",
        "import threading; threading.Thread = None; __builtins__ = {}",
        "import sys; sys.setrecursionlimit(60)",
        "import os; os.chdir('/tmp'); os.environ.clear()",
        "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)",
    ],
)
def test_a_vandalised_interpreter_does_not_spoil_later_calls(arena: Arena, code: str) -> None:
    arena.python(code)
    answer = arena.call("python_reset", {})
    assert answer.status_code == 200, answer.text
    assert "alive 42" in arena.python("print('alive', 40 + 2)").text


def test_modules_of_the_workspace_are_the_users_alone(arena: Arena) -> None:
    for name in ("json.py", "sitecustomize.py", "usercustomize.py", "os.py", "ast.py", "linecache.py", "traceback.py"):
        arena.call("file_write", {"path": name, "content": "raise RuntimeError('imported by the worker')\n"})
    arena.call("file_write", {"path": "mine.py", "content": "value = 42\n"})
    assert arena.call("python_reset", {}).status_code == 200
    answer = arena.python("import mine; mine.value")
    assert answer.status_code == 200, answer.text
    assert "42" in answer.text
    failing = arena.python("1 / 0")
    assert "ZeroDivisionError" in failing.text
    assert "imported by the worker" not in failing.text


PROBES = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
said = {}
def syscall(name, number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(number, *args)
    said[name] = 'OK' if result >= 0 else os.strerror(ctypes.get_errno())
syscall('mount', 165, b'none', b'/tmp', b'tmpfs', 0, None)
syscall('bpf', 321, 0, None, 0)
syscall('keyctl', 250, 0, -3, 0)
syscall('perf_event_open', 298, None, 0, -1, -1, 0)
syscall('ptrace 1', 101, 16, 1, 0, 0)
syscall('io_uring_setup', 425, 4, None)
syscall('userfaultfd', 323, 0)
for name, family, kind in (('raw', socket.AF_INET, socket.SOCK_RAW), ('packet', socket.AF_PACKET, socket.SOCK_RAW), ('vsock', socket.AF_VSOCK, socket.SOCK_STREAM)):
    try:
        socket.socket(family, kind).close()
        said[name] = 'OK'
    except OSError as error:
        said[name] = error.strerror
sorted(name for name, result in said.items() if result == 'OK')
"""


def test_the_kernels_dangerous_parts_are_closed(arena: Arena) -> None:
    answer = arena.python(PROBES)
    assert answer.status_code == 200, answer.text
    assert answer.json()["structured"]["result"] == "[]"


def test_no_secret_and_no_engine_is_in_reach(arena: Arena) -> None:
    code = "import os\nfound = [p for p in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock') if os.path.exists(p)]\nsecrets = [n for n in os.environ if n.startswith(('TOOLSERVER', 'AGENT', 'OPENAI', 'TOOLCRIB_TEST'))]\nfound + secrets"
    assert arena.python(code).json()["structured"]["result"] == "[]"


def test_no_network_is_in_reach(arena: Arena) -> None:
    port = arena.server.url.rsplit(":", 1)[1]
    code = f"""
import socket
reached = []
for host, port in (('127.0.0.1', {port}), ('172.17.0.1', {port}), ('169.254.169.254', 80)):
    try:
        socket.create_connection((host, port), timeout=3).close()
        reached.append(host)
    except OSError:
        pass
reached
"""
    assert arena.python(code).json()["structured"]["result"] == "[]"
