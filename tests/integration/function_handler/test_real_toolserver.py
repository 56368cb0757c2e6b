"""The FunctionHandler against a real ToolServer with real sandboxes: effects are lines in a file of the workspace."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent.events import Event, EventKind
from agent.settings import ToolServerSettings
from agent.store.memory_store import MemoryJournal
from agent.tools.function_handler import FunctionHandler
from agent.tools.outcome import Invocation, Outcome, OutcomeKind
from agent.tools.workspace_store import WorkspaceStore
from agent.toolserver_client.client import ToolServerClient
from agent.toolserver_client.errors import ToolServerAnswer
from tests.server_process import ServerProcess

pytestmark = pytest.mark.bubblewrap

EFFECT = "open('effects', 'a').write('x\\n')\n"


class Unlimited:
    """An allowance for tests that are not about budgets."""

    def reserve_tool_call(self) -> None:
        return None


class Killed(BaseException):
    """Stands for kill -9 of the agent."""


class Process:
    """One agent process; the next one gets the same events and folder."""

    def __init__(
        self, server: ServerProcess, folder: Path, events: list[Event], key: str | None = None, **changes: Any
    ) -> None:
        self.server, self.folder, self.events = server, folder, events
        self.journal = MemoryJournal(folder.name, events)
        self.client = ToolServerClient(server.url, key or server.key, trace_seed=folder.name)
        self.store = WorkspaceStore(folder)
        self.handler = FunctionHandler(
            self.client, self.journal, ToolServerSettings(**changes), folder.name, self.store, Unlimited()
        )

    async def call(self, place: str, tool: str, **arguments: Any) -> Outcome:
        return await self.handler.call(Invocation(f"t1/a1/actor/{place}/c0", "t1", tool, json.dumps(arguments)))

    async def python(self, place: str, code: str) -> Outcome:
        return await self.call(place, "python_execute", code=code)

    async def effects(self) -> int:
        """Lines in the session, and that the run's folder has as many."""
        counted = await self.python("count", "open('effects').read().count('x')")
        return int(counted.observation.split()[-1])

    def dies_at(self, kind: EventKind, *, written: bool) -> None:
        append = self.journal.append

        def dying(event_kind: EventKind, data: dict[str, Any]) -> Event:
            event = append(event_kind, data) if written or event_kind is not kind else None
            if event_kind is kind or event is None:
                raise Killed
            return event

        self.journal.append = dying  # type: ignore[method-assign, assignment]

    def lines(self) -> int:
        return (self.folder / "effects").read_text().count("x")


class Restartable(ServerProcess):
    """Comes back at the same address, as a server under a supervisor does."""

    def restart(self, limit_s: float = 40) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.kill()
        command = [sys.executable, "-m", "toolserver", "serve", "--port", self.url.rpartition(":")[2]]
        command += ["--runtime", self.runtime, "--state-dir", str(self.folder / "state")]
        with (self.folder / "server.log").open("ab") as log:
            environment = {**os.environ, "TOOLSERVER_API_KEY": self.key}
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            try:
                if httpx.get(
                    f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.key}"}, trust_env=False
                ).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server did not come back:\n{self.log()[-3000:]}")


Start = Callable[..., Process]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess("bubblewrap", tmp_path_factory.mktemp("server")).start()
    yield server
    server.end()


@pytest.fixture
def own(tmp_path: Path, shared: ServerProcess) -> Iterator[Restartable]:
    """A server that the test may kill. `shared` only makes sure that there is bubblewrap."""
    server = Restartable("bubblewrap", tmp_path / "server")
    server.start()
    yield server
    server.end()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    processes: list[Process] = []
    events: list[Event] = []

    def begin(server: ServerProcess, **changes: Any) -> Process:
        processes.append(
            Process(
                server,
                tmp_path / f"w-{secrets.token_hex(4)}" if not processes else processes[0].folder,
                events,
                **changes,
            )
        )
        return processes[-1]

    yield begin
    for process in processes[:-1]:
        await process.client.close()
    for process in processes[-1:]:
        await process.handler.close()


async def running(process: Process, limit_s: float = 20.0) -> str:
    """The id of the call that was sent last, once the server knows it."""
    async with asyncio.timeout(limit_s):
        while True:
            intents = [event.data["call_id"] for event in process.events if event.kind is EventKind.TOOL_INTENDED]
            if intents:
                try:
                    await process.client.get_call(intents[-1])
                except ToolServerAnswer as answer:
                    if answer.code == "still_running":
                        return str(intents[-1])
            await asyncio.sleep(0.05)


async def test_state_files_pictures_and_failures_come_through(
    start: Start, shared: ServerProcess, tmp_path: Path
) -> None:
    process = start(shared)
    (tmp_path / "in.csv").write_text("a\n1\n2\n")
    process.store.add_inputs([tmp_path / "in.csv"])
    tools = {tool.name: tool.effect for tool in await process.handler.catalog()}
    assert (tools["python_execute"], tools["file_read"]) == ("once", "read")
    assert "call_wait" not in tools
    assert (
        await process.python("s1", "import csv\nrows = list(csv.reader(open('in.csv')))\nlen(rows)")
    ).observation == "3"
    kept = await process.python("s2", "open('out.txt', 'w').write(str(rows))\nlen(rows) + 1")
    assert kept.observation.startswith("4")
    assert kept.workspace_changed == ["out.txt"]
    assert (process.folder / "out.txt").read_text() == "[['a'], ['1'], ['2']]"
    failed = await process.python("s3", "{}['missing']")
    assert (failed.kind, failed.code, failed.executed) == (OutcomeKind.FAILED, "tool_failed", "yes")
    assert "KeyError" in failed.observation
    crashed = await process.python("s4", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert crashed.code == "tool_crashed"
    assert "state is lost" in crashed.observation
    refused = await process.call("s5", "file_read", path="../../etc/passwd")
    assert refused.kind in (OutcomeKind.INVALID, OutcomeKind.FAILED)
    assert "root:" not in refused.observation
    long = await process.python("s6", "print('y' * 300_000)")
    assert len(long.observation) <= 12_000
    artifact = long.artifacts[0]["path"]
    assert artifact in long.observation
    assert (process.folder / artifact).stat().st_size >= 300_000


@pytest.mark.parametrize("kind", [EventKind.SESSION_OPENED, EventKind.TOOL_INTENDED, EventKind.TOOL_SETTLED])
@pytest.mark.parametrize("written", [False, True])
async def test_an_agent_that_dies_at_any_event_leaves_one_effect(
    start: Start, shared: ServerProcess, kind: EventKind, written: bool
) -> None:
    process = start(shared)
    process.dies_at(kind, written=written)
    with pytest.raises(Killed):
        await process.python("s1", EFFECT)
    later = start(shared)
    assert (await later.python("s1", EFFECT)).kind is OutcomeKind.DONE
    assert later.lines() == await later.effects() == 1


async def test_an_agent_that_dies_while_the_tool_runs_waits_for_it_the_next_time(
    start: Start, shared: ServerProcess
) -> None:
    process = start(shared)
    code = "import time\ntime.sleep(5)\n" + EFFECT
    call = asyncio.create_task(process.python("s1", code))
    await running(process)
    process.handler._settle_interrupted = _nothing  # type: ignore[method-assign, assignment]
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    later = start(shared)
    assert (await later.python("s1", code)).kind is OutcomeKind.DONE
    assert later.lines() == await later.effects() == 1


async def _nothing(*_: object) -> bool:
    """A process that was killed cancels and settles nothing."""
    return False


async def test_a_call_is_followed_through_its_450s(start: Start, shared: ServerProcess) -> None:
    process = start(shared, wait_s=0.4)
    outcome = await process.python(
        "s1", "import time\nprint('begun', flush=True)\ntime.sleep(1.5)\n" + EFFECT + "'over'"
    )
    assert outcome.kind is OutcomeKind.DONE
    assert "begun" in outcome.observation
    assert await process.effects() == 1


async def test_a_call_past_all_waits_is_stopped_and_tells_its_output(start: Start, shared: ServerProcess) -> None:
    process = start(shared, wait_s=0.5, max_continuations=2)
    outcome = await process.python("s1", "import time\nprint('begun', flush=True)\ntime.sleep(600)")
    assert (outcome.kind, outcome.code) == (OutcomeKind.TIMEOUT, "still_running")
    assert "begun" in outcome.observation
    assert (await process.python("s2", "1 + 1")).kind is OutcomeKind.DONE


async def test_a_call_past_its_deadline_is_a_timeout(start: Start, shared: ServerProcess) -> None:
    process = start(shared, deadline_s=1)
    outcome = await process.python("s1", "import time\nprint('begun', flush=True)\ntime.sleep(600)")
    assert (outcome.kind, outcome.code) == (OutcomeKind.TIMEOUT, "deadline_exceeded")
    assert "begun" in outcome.observation


async def test_ctrl_c_stops_the_call_in_its_sandbox(start: Start, shared: ServerProcess) -> None:
    process = start(shared)
    call = asyncio.create_task(process.python("s1", "import time\ntime.sleep(600)"))
    call_id = await running(process)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with shared.client() as http:
        assert http.get(f"/v1/calls/{call_id}", params={"wait_s": 5}).json()["detail"]["code"] == "cancelled"
    later = start(shared)
    assert (await later.python("s1", "import time\ntime.sleep(600)")).kind is OutcomeKind.CANCELLED


async def test_a_session_that_was_ended_comes_back_with_its_files(start: Start, shared: ServerProcess) -> None:
    process = start(shared)
    await process.python(
        "s1", EFFECT + "x = 1\nimport os\nos.makedirs('d')\nopen('d/a.bin', 'wb').write(bytes(range(256)))"
    )
    session_id = process.events[0].data["session_id"]
    with shared.client() as http:
        http.delete(f"/v1/sessions/{session_id}")
    outcome = await process.python("s2", "import hashlib\nhashlib.sha256(open('d/a.bin', 'rb').read()).hexdigest()[:8]")
    assert outcome.kind is OutcomeKind.DONE
    assert "40aff2e9" in outcome.observation
    assert "The session was gone (deleted)" in outcome.observation
    assert (await process.python("s3", "x")).kind is OutcomeKind.FAILED, "its variables are lost, as it was told"


async def test_many_files_come_back_too(start: Start, shared: ServerProcess) -> None:
    process = start(shared)
    await process.python(
        "s1", "import os\nos.makedirs('many')\nfor n in range(150):\n    open(f'many/{n}.txt', 'w').write(str(n))"
    )
    assert len(process.store.files()) == 150
    with shared.client() as http:
        http.delete(f"/v1/sessions/{process.events[0].data['session_id']}")
    outcome = await process.python("s2", "sum(int(open(f'many/{n}.txt').read()) for n in range(150))")
    assert "11175" in outcome.observation


async def test_a_session_that_ends_under_a_call_leaves_it_unknown(start: Start, shared: ServerProcess) -> None:
    process = start(shared)
    await process.python("s1", "open('before', 'w').write('b')")
    call = asyncio.create_task(process.python("s2", EFFECT + "import time\ntime.sleep(600)"))
    await running(process)
    with shared.client() as http:
        await asyncio.to_thread(http.delete, f"/v1/sessions/{process.events[0].data['session_id']}")
    outcome = await call
    assert (outcome.kind, outcome.executed) == (OutcomeKind.UNKNOWN, "possible")
    assert "restored to the state before this call" in outcome.observation
    listed = await process.call("s3", "file_list")
    assert "before" in listed.observation
    assert "effects" not in listed.observation


async def test_a_server_killed_under_a_call_does_not_cost_the_call(start: Start, own: Restartable) -> None:
    process = start(own, max_attempts=20, breaker_failures=100)
    await process.python("s1", EFFECT)
    call = asyncio.create_task(process.python("s2", EFFECT + "import time\ntime.sleep(5)"))
    await running(process)
    own.kill()
    await asyncio.to_thread(own.restart)
    outcome = await call
    assert outcome.kind is OutcomeKind.DONE
    assert process.lines() == await process.effects() == 2


async def test_a_server_killed_between_two_calls_costs_nothing(start: Start, own: Restartable) -> None:
    process = start(own, max_attempts=20, breaker_failures=100)
    await process.python("s1", EFFECT + "kept = 41")
    own.kill()
    call = asyncio.create_task(process.python("s2", EFFECT + "kept + 1"))
    await asyncio.to_thread(own.restart)
    outcome = await call
    assert outcome.kind is OutcomeKind.DONE
    assert "42" in outcome.observation
    assert process.lines() == await process.effects() == 2


async def test_a_server_with_another_key_is_told_apart_from_one_that_is_down(start: Start, own: Restartable) -> None:
    process = start(own)
    await process.python("s1", "1")
    own.stop()
    down = await start(own, max_attempts=1).python("s2", "1")
    assert (down.kind, down.code) == (OutcomeKind.UNAVAILABLE, "connection_refused")
    own.restart()
    locked_out = await start(own, key="not-its-key").python("s3", "1")
    assert (locked_out.kind, locked_out.code) == (OutcomeKind.UNAVAILABLE, "unauthorized")
    assert "AGENT_TOOLSERVER__API_KEY" in locked_out.observation
    assert (await start(own).python("s4", "2 + 2")).kind is OutcomeKind.DONE
