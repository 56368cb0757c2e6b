"""What code finds inside a real sandbox. Only ever run there: some of it would hurt a host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.conformance.conftest import LIMITS, Bench, read_all
from toolserver.runtime.hardening import pids_limit

FACTS = """
import json, os, socket
def say(name, work):
    try:
        facts[name] = work()
    except (OSError, RuntimeError, MemoryError) as problem:
        facts[name] = type(problem).__name__
facts = {}
status = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)
facts.update({k: status[k].split() if k in status else None for k in ('Uid', 'Gid', 'CapEff', 'CapPrm', 'CapBnd', 'CapInh', 'CapAmb', 'NoNewPrivs', 'Seccomp')})
facts['pid'] = os.getpid()
facts['hostname'] = socket.gethostname()
facts['cwd'] = os.getcwd()
facts['env'] = sorted(os.environ)
facts['processes'] = sum(name.isdigit() for name in os.listdir('/proc'))
facts['interfaces'] = [line.split(':')[0].strip() for line in open('/proc/net/dev')][2:]
facts['socket files'] = [p for p in ('/var/run/docker.sock', '/run/docker.sock', '/run/containerd/containerd.sock') if os.path.exists(p)]
for place in ('/', '/etc', '/usr', '/usr/bin', '/opt', '/dev', '/opt/toolcrib', '/var', '/root'):
    say('write ' + place, lambda: open(place + '/probe', 'w').close())
for place in ('/tmp', '/workspace', '/dev/shm'):
    say('write ' + place, lambda: open(place + '/probe', 'w').close())
for name, family, kind in (('netlink', 16, 3), ('packet', 17, 3), ('alg', 38, 5), ('vsock', 40, 1), ('unix', 1, 1), ('inet', 2, 1)):
    say('socket ' + name, lambda: socket.socket(family, kind).close())
say('socket raw', lambda: socket.socket(2, 3, 1).close())
say('connect', lambda: socket.create_connection(('192.0.2.1', 53), 3).close())
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
numbers = {'x86_64': (272, 165, 321, 250, 425, 101, 435, 298, 323), 'aarch64': (97, 40, 280, 219, 425, 117, 435, 241, 282)}[platform.machine()]
for name, number in zip(('unshare', 'mount', 'bpf', 'keyctl', 'io_uring', 'ptrace', 'clone3', 'perf', 'userfaultfd'), numbers):
    ctypes.set_errno(0)
    arguments = (0x10000000, 0, 0, 0, 0) if name == 'unshare' else (0, 0, 0, 0, 0)
    facts['call ' + name] = [libc.syscall(number, *arguments), ctypes.get_errno()]
import resource
facts['core'] = resource.getrlimit(resource.RLIMIT_CORE)
facts['nofile'] = resource.getrlimit(resource.RLIMIT_NOFILE)
facts['fsize'] = resource.getrlimit(resource.RLIMIT_FSIZE)
print(json.dumps(facts), flush=True)
"""


async def _facts(bench: Bench, program: str = FACTS, **changes: Any) -> Any:
    # without -S some modules are found, as by the code of users
    return json.loads(await bench.output(program, **changes))


async def test_code_has_no_privilege_and_sees_nothing_of_the_host(real_bench: Bench) -> None:
    facts = await _facts(real_bench)
    assert "0" not in facts["Uid"] + facts["Gid"]
    for name in ("CapEff", "CapPrm", "CapBnd", "CapInh"):
        assert int(facts[name][0], 16) == 0, name
    if not real_bench.on_gvisor:  # that has no such line, and its filter is outside, around all of it
        assert int(facts["CapAmb"][0], 16) == 0
        assert facts["NoNewPrivs"] == ["1"]
        assert facts["Seccomp"] == ["2"]
    assert facts["pid"] == 1
    assert facts["processes"] == 1
    assert facts["hostname"] == "sandbox"
    assert facts["cwd"] == "/workspace"
    assert facts["socket files"] == []
    assert not [name for name in facts["env"] if name.startswith(("TOOLSERVER", "AGENT", "DOCKER", "PIP", "VIRTUAL"))]


async def test_only_workspace_and_temporary_folders_can_be_written(real_bench: Bench) -> None:
    facts = await _facts(real_bench)
    written = {
        name.removeprefix("write ") for name, said in facts.items() if name.startswith("write ") and said is None
    }
    assert written == {"/tmp", "/workspace", "/dev/shm"}


async def test_nothing_can_be_reached(real_bench: Bench) -> None:
    facts = await _facts(real_bench)
    assert facts["interfaces"] == ["lo"]
    assert facts["connect"] in ("OSError", "TimeoutError", "ConnectionRefusedError")


async def test_dangerous_system_calls_and_socket_families_are_refused(real_bench: Bench) -> None:
    facts = await _facts(real_bench)
    if (
        real_bench.on_gvisor
    ):  # its own kernel answers: what it has is namespaces, netlink and tracing of its own processes
        assert {name for name, said in facts.items() if name.startswith("socket ") and said is None} == {
            "socket unix",
            "socket inet",
            "socket netlink",
        }
        done = {name for name, said in facts.items() if name.startswith("call ") and said[0] >= 0}
        assert done <= {"call unshare", "call ptrace"}
        return
    for name in ("netlink", "packet", "alg", "vsock", "raw"):
        assert facts[f"socket {name}"] == "PermissionError", name
    assert facts["socket unix"] is None
    assert facts["socket inet"] is None
    for name in ("unshare", "mount", "bpf", "keyctl", "io_uring", "ptrace", "perf", "userfaultfd"):
        assert facts[f"call {name}"] == [-1, 1], name
    assert facts["call clone3"] == [-1, 38]


async def test_process_limits_are_set(real_bench: Bench) -> None:
    facts = await _facts(real_bench)
    assert facts["core"] == [0, 0]
    assert facts["nofile"] == [1024, 1024]
    assert facts["fsize"] == [LIMITS.disk_mb << 20] * 2


async def test_processes_stop_at_their_limit_and_another_session_does_not_suffer(real_bench: Bench) -> None:
    bomb = """
import os, time
made = 0
for _ in range(500):
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    except OSError:
        break
    made += 1
print(made, flush=True)
time.sleep(60)
"""
    await real_bench.runtime.create_workspace("s2", 16)
    sandbox = await real_bench.start(bomb)
    said = await sandbox.receive()
    other = await real_bench.output(
        "import os\nprint(os.waitstatus_to_exitcode(os.system('exit 3')))", workspace_id="s2"
    )
    await sandbox.remove()
    assert other == b"3\n"
    if not (real_bench.on_gvisor and said == b""):  # past the limit gVisor ends as a whole
        assert 8 < int(said) <= pids_limit(LIMITS, gvisor=real_bench.on_gvisor)


async def test_one_process_can_not_take_more_memory_than_its_limit(real_bench: Bench) -> None:
    greedy = """
import os
kept = []
try:
    for _ in range(64):
        kept.append(os.urandom(1 << 20) * 8)
    print('took all', flush=True)
except MemoryError:
    kept = []
    print('MemoryError', flush=True)
"""
    sandbox = await real_bench.start(greedy)
    said = await read_all(sandbox)
    end = await sandbox.remove()
    assert (said, end.cause) in ((b"MemoryError\n", "exited"), (b"", "oom"))


async def test_temporary_folders_are_sized(real_bench: Bench) -> None:
    fill = """
import json
written = {}
for place in ('/tmp', '/dev/shm'):
    written[place] = 0
    try:
        for n in range(200):
            with open(f'{place}/{n}', 'wb') as out:
                out.write(bytes(1 << 20))
            written[place] += 1
    except OSError:
        pass
print(json.dumps(written), flush=True)
"""
    written = await _facts(real_bench, fill, limits=replace(LIMITS, memory_mb=256))
    assert written["/tmp"] <= 64
    assert written["/dev/shm"] <= 32


async def test_a_read_only_workspace_can_be_read_alone(real_bench: Bench) -> None:
    await real_bench.output("open('/workspace/note', 'w').write('kept')")
    look = """
print(open('/workspace/note').read())
try:
    open('/workspace/new', 'w')
except OSError as problem:
    print(type(problem).__name__, flush=True)
"""
    assert await real_bench.output(look, workspace="ro") == b"kept\nOSError\n"


async def test_a_sandbox_without_workspace_has_none(real_bench: Bench) -> None:
    look = "import os; print(os.path.exists('/workspace/note'), flush=True)"
    await real_bench.output("open('/workspace/note', 'w').write('kept')")
    assert await real_bench.output(look, workspace="none") == b"False\n"


@pytest.mark.parametrize("egress", [False, True])
async def test_no_sandbox_has_a_network(real_bench: Bench, egress: bool) -> None:
    look = """
print(len(open('/proc/net/dev').readlines()) - 2)
try:
    import os
    print(os.listdir('/.toolcrib/egress'), flush=True)
except OSError as problem:
    print(type(problem).__name__, flush=True)
"""
    interfaces, doors = (await real_bench.output(look, egress=egress)).decode().splitlines()
    assert interfaces == "1"
    assert doors in (("[]", "PermissionError") if egress else ("FileNotFoundError",))


async def test_fixed_environment_arrives_and_names_the_threads(real_bench: Bench) -> None:
    program = (
        "import os; print(os.environ['GREETING'], os.environ['OPENBLAS_NUM_THREADS'], os.environ['HOME'], flush=True)"
    )
    assert await real_bench.output(program, env={"GREETING": "hé"}) == "hé 1 /tmp\n".encode()


async def test_threads_subprocesses_and_process_pools_work(real_bench: Bench) -> None:
    program = """
import multiprocessing, subprocess, threading
with multiprocessing.get_context('fork').Pool(2) as pool:
    print(pool.map(abs, [-1, 2]))
threads = [threading.Thread(target=print, args=('thread',)) for _ in range(2)]
for thread in threads:
    thread.start()
    thread.join()
print(subprocess.run(['sh', '-c', 'echo out; git --version | cut -c1-3'], capture_output=True, text=True).stdout, flush=True)
"""
    assert await real_bench.output(program) == b"[1, 2]\nthread\nthread\nout\ngit\n\n"
