from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conformance.conftest import RUNTIMES, Bench, make_runtime, read_all
from tests.conformance.programs import DEAF, ECHO, EXIT_42, RECALL, REMEMBER, UNDYING
from toolserver.errors import RuntimeUnavailable, SandboxGone
from toolserver.runtime.base import Inventory, Sandbox, SandboxEnded
from toolserver.runtime.bubblewrap_sandbox import Processes
from toolserver.runtime.docker_runtime import DockerRuntime


async def test_what_is_sent_comes_back(bench: Bench) -> None:
    sandbox = await bench.start(ECHO)
    await sandbox.send(b"hello\n")
    assert await sandbox.receive() == b"hello\n"
    end = await sandbox.remove()
    assert end.cause == "killed"


async def test_exit_code_is_reported_every_time(bench: Bench) -> None:
    async def once() -> tuple[str, int | None]:
        sandbox = await bench.start(EXIT_42)
        await read_all(sandbox)
        end = await sandbox.remove()
        return end.cause, end.exit_code

    for _ in range(3):
        assert await asyncio.gather(*(once() for _ in range(4))) == [("exited", 42)] * 4


async def test_kill_ends_what_ignores_signals_within_seconds(bench: Bench) -> None:
    sandbox = await bench.start(UNDYING)
    assert await sandbox.receive() == b"up"
    begun = time.monotonic()
    await sandbox.kill()
    assert time.monotonic() - begun < 5
    assert await read_all(sandbox) == b""
    assert (await sandbox.remove()).cause == "killed"


async def test_kill_of_what_has_ended_is_no_error(bench: Bench) -> None:
    sandbox = await bench.start(EXIT_42)
    await read_all(sandbox)
    await sandbox.kill()
    await sandbox.kill()
    assert (await sandbox.remove()).exit_code == 42


async def test_removing_twice_gives_the_same_end(bench: Bench) -> None:
    sandbox = await bench.start(EXIT_42)
    await read_all(sandbox)
    first, second = await asyncio.gather(sandbox.remove(), sandbox.remove())
    assert first == second == await sandbox.remove()
    await sandbox.kill()


async def test_sending_to_a_removed_sandbox_says_it_is_gone(bench: Bench) -> None:
    sandbox = await bench.start(ECHO)
    await sandbox.remove()
    with pytest.raises(SandboxGone):
        await sandbox.send(b"late\n")
    assert await sandbox.receive() == b""


@pytest.mark.parametrize("changes", [{"command": ("/no/such/program",)}, {"reference": "example.invalid/none:1"}])
async def test_failed_start_says_so_and_leaves_nothing(real_bench: Bench, changes: dict[str, object]) -> None:
    with pytest.raises(RuntimeUnavailable) as told:
        await real_bench.start(ECHO, **changes)
    assert "/tmp" not in str(told.value)
    await real_bench.runtime.delete_workspace("s1")
    until = time.monotonic() + 10
    while left := await real_bench.runtime.sweep():  # what gVisor had mounted goes a moment after its start failed
        assert real_bench.on_gvisor and time.monotonic() < until, left  # noqa: PT018
        await asyncio.sleep(0.1)


async def test_a_cancelled_start_leaves_no_sandbox(bench: Bench) -> None:
    starting = asyncio.create_task(bench.start(DEAF))
    await asyncio.sleep(0.02)
    starting.cancel()
    await asyncio.wait([starting])
    if not starting.cancelled():  # it was quicker than the cancellation
        await starting.result().remove()
    await bench.runtime.delete_workspace("s1")
    assert await bench.runtime.sweep() == 0


async def test_workspace_is_shared_and_outlives_its_sandboxes(bench: Bench) -> None:
    assert await bench.output(REMEMBER) == b"written\n"
    first, second = await asyncio.gather(bench.output(RECALL), bench.output(RECALL))
    assert first == second == b"kept\n"


async def test_workspaces_are_apart(real_bench: Bench) -> None:
    await real_bench.runtime.create_workspace("s2", 16)
    await real_bench.output(REMEMBER)
    look = "import os; print(os.listdir('/workspace'), flush=True)"
    assert await real_bench.output(look, workspace_id="s2") == b"[]\n"


async def test_deleting_a_workspace_twice_is_no_error_and_it_is_empty_when_made_again(real_bench: Bench) -> None:
    await real_bench.output(REMEMBER)
    await real_bench.runtime.delete_workspace("s1")
    await real_bench.runtime.delete_workspace("s1")
    await real_bench.runtime.create_workspace("s1", 16)
    assert await real_bench.output("import os; print(os.listdir('/workspace'), flush=True)") == b"[]\n"


async def test_deep_trees_and_closed_folders_are_deleted(real_bench: Bench) -> None:
    made = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\nos.mkdir('/workspace/shut', 0)\nprint('made', flush=True)"
    assert await real_bench.output(made) == b"made\n"
    await real_bench.runtime.delete_workspace("s1")
    assert await real_bench.runtime.sweep() == 0


async def test_sweep_removes_what_is_not_kept_and_nothing_else(bench: Bench) -> None:
    await bench.runtime.create_workspace("s2", 16)
    ended, kept = await asyncio.gather(bench.start(ECHO), bench.start(ECHO, workspace_id="s2"))
    found = await bench.runtime.inventory()
    both = frozenset({ended.spec.sandbox_id, kept.spec.sandbox_id})
    assert found == Inventory(both, both, frozenset({"s1", "s2"}))
    assert await bench.runtime.sweep(frozenset({kept.spec.sandbox_id}), frozenset({"s2"})) == 2
    assert await read_all(ended) == b""
    await kept.send(b"still here\n")
    assert await kept.receive() == b"still here\n"
    assert (await bench.runtime.has_workspace("s1"), await bench.runtime.has_workspace("s2")) == (False, True)
    await kept.remove()
    await ended.remove()
    assert (await bench.runtime.inventory()).sandboxes == frozenset()


async def test_a_sandbox_that_was_let_go_is_attached_again_in_its_state(bench: Bench) -> None:
    first = await bench.start(ECHO)
    await first.send(b"one\n")
    assert await first.receive() == b"one\n"
    await first.release()
    again = await bench.runtime.attach(first.spec, first.handle)
    assert again.handle == first.handle
    await again.send(b"two\n")
    assert await again.receive() == b"two\n"
    assert (await bench.runtime.inventory()).running == {first.spec.sandbox_id}
    assert (await again.remove()).cause == "killed"
    with pytest.raises(SandboxEnded):
        await bench.runtime.attach(first.spec, first.handle)


@pytest.mark.bubblewrap
@pytest.mark.parametrize("bench", RUNTIMES[1:2], indirect=True)
async def test_one_that_was_let_go_tells_its_exit_code_and_leaves_no_zombie(bench: Bench) -> None:
    def monitor(sandbox: Sandbox) -> Path:
        processes = Processes.load(sandbox.handle)
        assert processes is not None
        return Path("/proc", str(processes.monitor.pid))

    ends_when_told = "import sys; sys.stdin.readline(); sys.exit(42)"
    first = await bench.start(ends_when_told)
    await first.release()
    again = await bench.runtime.attach(first.spec, first.handle)
    await again.send(b"now\n")
    assert await again.receive() == b""
    end = await again.remove()
    assert (end.cause, end.exit_code, monitor(first).exists()) == ("exited", 42, False)
    second = await bench.start(ends_when_told)
    await second.send(b"now\n")
    assert await second.receive() == b""
    await second.release()
    end = await second.remove()
    assert (end.cause, end.exit_code, monitor(second).exists()) == ("exited", 42, False)
    third = await bench.start(ECHO)
    await third.release()
    await bench.runtime.discard(frozenset({third.spec.sandbox_id}), frozenset())
    assert not monitor(third).exists()


async def test_what_a_sandbox_says_while_nobody_holds_it_does_not_stop_it(real_bench: Bench) -> None:
    program = (
        "import sys\nfor line in sys.stdin: print('x' * 5000); sys.stdout.flush(); open('/workspace/n', 'a').write('n')"
    )
    first = await real_bench.start(program)
    await first.send(b"go\n" * 5)
    await first.release()
    await asyncio.sleep(0.5)
    again = await real_bench.runtime.attach(first.spec, first.handle)
    await again.remove()
    assert await real_bench.output("print(open('/workspace/n').read(), flush=True)") == b"nnnnn\n"


async def test_an_ended_sandbox_is_not_attached_and_can_be_discarded(bench: Bench) -> None:
    first = await bench.start(EXIT_42)
    await read_all(first)
    await first.release()

    async def attach_until_it_fails() -> None:
        for _ in range(100):  # the engine may note its end later than its stream
            await (await bench.runtime.attach(first.spec, first.handle)).release()
            await asyncio.sleep(0.05)

    with pytest.raises(SandboxEnded):
        await attach_until_it_fails()
    await bench.runtime.discard(frozenset({first.spec.sandbox_id}), frozenset())
    assert (await bench.runtime.inventory()).sandboxes == frozenset()


@pytest.mark.docker
async def test_containers_that_a_hand_renamed_or_paused_are_removed_and_hold_nothing_up(tmp_path: Path) -> None:
    runtime = make_runtime("docker", f"test-{uuid.uuid4().hex[:12]}", tmp_path)
    assert isinstance(runtime, DockerRuntime)
    bench, engine, other = Bench(runtime), runtime.engine, f"renamed-{uuid.uuid4().hex}"
    for name in ("s1", "s2", "s3"):
        await runtime.create_workspace(name, 16)
    renamed, paused, held = [await bench.start(ECHO, workspace_id=name) for name in ("s1", "s2", "s3")]
    for sandbox in (renamed, paused, held):
        await sandbox.release()
    await engine.call(lambda client: client.rename(renamed.handle, other))
    await engine.call(lambda client: client.pause(paused.handle))
    again = await runtime.attach(renamed.spec, renamed.handle)
    await again.send(b"still there\n")
    assert await again.receive() == b"still there\n"
    await again.release()
    with pytest.raises(SandboxEnded):
        await runtime.attach(paused.spec, paused.handle)
    found = await runtime.inventory()
    with pytest.raises(RuntimeUnavailable):  # the volume of the third is in use; the others go
        await runtime.discard(found.sandboxes - {held.spec.sandbox_id}, found.workspaces)
    left = await runtime.inventory()
    assert (left.sandboxes, left.workspaces) == (frozenset({held.spec.sandbox_id}), frozenset({"s3"}))
    await runtime.sweep()
    await runtime.close()


async def test_limits_are_never_raised(bench: Bench) -> None:
    asked = bench.spec(ECHO).limits
    assert bench.runtime.effective_limits(asked) == asked
    much = replace(asked, memory_mb=1 << 30, cpus=4096.0)
    held = bench.runtime.effective_limits(much)
    assert held.memory_mb <= much.memory_mb
    assert held.cpus <= much.cpus


async def test_isolation_speaks_of_every_limit(bench: Bench) -> None:
    told = bench.runtime.isolation()
    assert {"runtime", "kernel", "memory", "cpus", "pids", "disk", "seccomp", "network"} <= set(told)
