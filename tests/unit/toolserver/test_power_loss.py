"""A machine that loses power: the last commits are gone from the disk, the workspaces and what was synced are there."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from tests.unit.toolserver.crib import Crib, crashing, detail, new_runtime, running, settings
from toolserver.store import boot, snapshots
from toolserver.store.snapshots import SnapshotRow

FILES = ("toolserver.db", "toolserver.db-wal")


class Machine:
    """What is on its disk: `sync` is what the kernel has written, `lose_power` leaves that alone, and boots again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = settings(folder / "state", session={"at_shutdown": "keep"})
        self.runtime = new_runtime(self.settings)
        self._disk, self._boots, self._boot_id = folder / "disk", 1, folder / "boot_id"
        self._disk.mkdir()
        self._boot_id.write_text("boot-1\n")
        monkeypatch.setattr(boot, "_BOOT_ID", self._boot_id)

    def sync(self) -> None:
        for name in FILES:
            if (self.settings.state_dir / name).exists():
                shutil.copyfile(self.settings.state_dir / name, self._disk / name)

    async def lose_power(self) -> None:
        (self.settings.state_dir / "toolserver.db-shm").unlink(missing_ok=True)
        for name in FILES:
            shutil.copyfile(self._disk / name, self.settings.state_dir / name)
        await self.boot()

    async def boot(self) -> None:
        for sandbox in list(self.runtime.sandboxes.values()):
            await sandbox.kill()
        self._boots += 1
        self._boot_id.write_text(f"boot-{self._boots}\n")

    def mark(self, session: str) -> str | None:
        """As it is in the store."""
        with closing(sqlite3.connect(self.settings.state_dir / "toolserver.db")) as database:
            query = "SELECT used_in_boot FROM sessions WHERE session_id = ?"
            found = database.execute(query, (session,)).fetchone()
        return None if found is None else found[0]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


async def rest(crib: Crib) -> None:
    """As if nothing had been used for a minute."""
    for session in crib.server.registry.live():
        session.last_used -= 120
    await crib.server.reaper.note_rest()


async def test_a_call_that_the_disk_lost_does_not_run_again_and_the_workspace_goes_on(machine: Machine) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session(labels={"for": "me"})
        kept = await crib.call(session, "count", key="kept")
        taken = SnapshotRow("default", session, "a-snapshot", 1.0, 0, 0, 0)
        await crib.server.database.write(lambda connection: snapshots.add(connection, taken))
        machine.sync()
        assert (await crib.call(session, "count", key="lost")).json()["content"][0]["text"] == "count 2"
    await machine.lose_power()
    async with running(machine.settings, machine.runtime) as crib:
        told = detail(await crib.call(session, "count", key="lost"), 410, "session_gone")
        assert (told["cause"], told["effects"]) == ("node_lost", "possible")
        assert detail(await crib.client.get(f"/v1/sessions/{session}"), 410, "session_gone")["effects"] == "possible"
        assert (await crib.call(session, "count", key="kept")).content == kept.content  # what is known stays known
        detail(await crib.client.get("/v1/calls/lost"), 404, "call_not_found")
        following = told["successor"]
        listed = (await crib.client.get("/v1/sessions")).json()["sessions"]
        assert [(one["id"], one["labels"]) for one in listed] == [(following, {"for": "me"})]
        had = (await crib.client.get(f"/v1/sessions/{following}/snapshots")).json()["snapshots"]
        assert [one["snapshot_id"] for one in had] == ["a-snapshot"]
        assert (await crib.call(following, "count")).json()["content"][0]["text"] == "count 3"
        assert (await crib.client.delete(f"/v1/sessions/{following}")).status_code == 204
    assert not machine.runtime.sandboxes
    assert not machine.runtime.workspaces
    journal = "".join(path.read_text() for path in (machine.settings.state_dir / "journal").glob("*.jsonl"))
    assert f'"successor":"{following}"' in journal.replace(" ", "")
    assert '"not_run"' not in journal  # its row is missing, and that proves nothing


async def test_the_session_that_follows_has_the_same_way_out(machine: Machine) -> None:
    allow = {"mode": "allow", "allow": ["example.org:443"]}
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        assert (await crib.client.put(f"/v1/sessions/{session}/egress", json=allow)).status_code == 200
        await crib.call(session, "count")
        door, first = crib.sandbox(session).door, machine.runtime.egress
        machine.sync()
    await machine.lose_power()
    async with running(machine.settings, machine.runtime) as crib:
        following = detail(await crib.call(session, "count"), 410, "session_gone")["successor"]
        told = (await crib.client.get(f"/v1/sessions/{following}")).json()["egress"]
        assert (told["mode"], told["allow"]) == ("allow", ["example.org:443"])
        failing = asyncio.create_task(crib.call(following, "later", {"seconds": 1}, key="later"))
        while not any(call.sandbox for call in crib.server.executor.admission.held()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        proxy = machine.runtime.egress
        assert proxy is not None
        assert proxy is not first
        assert proxy.doors == {door: allow}
        assert crib.sandbox(following).door == door
        await proxy.deny(str(door), "evil.test", 443)  # told of under the name that the session has now
        assert detail(await failing, 500, "policy_denied")["denied"][0]["host"] == "evil.test"
        assert (await crib.client.delete(f"/v1/sessions/{following}")).status_code == 204
        assert not proxy.doors


async def test_a_call_under_way_is_unknown(machine: Machine) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        detail(await crib.call(session, "count", {"seconds": 30}, key="open", wait_s=0.1), 450, "still_running")
        machine.sync()
    await machine.lose_power()
    async with running(machine.settings, machine.runtime) as crib:
        detail(await crib.client.get("/v1/calls/open"), 500, "outcome_unknown")
        again = await crib.call(session, "count", {"seconds": 30}, key="open", wait_s=0.1)
        detail(again, 500, "outcome_unknown")


async def test_a_session_at_rest_goes_on_under_its_name(machine: Machine) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await crib.call(session, "count", key="one")
        await rest(crib)
        assert machine.mark(session) is None
        machine.sync()
    await machine.lose_power()
    async with running(machine.settings, machine.runtime) as crib:
        assert (await crib.call(session, "count", key="one")).json()["content"][0]["text"] == "count 1"
        assert (await crib.call(session, "count")).json()["content"][-1]["text"] == "count 2"


async def test_use_after_a_rest_is_on_the_disk_before_the_call_runs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await crib.call(session, "count")
        await rest(crib)
        write = crib.server.database.write

        async def watched(job: Callable[[Connection], Any], *, durable: bool = False) -> Any:
            waits.append(durable)
            return await write(job, durable=durable)

        monkeypatch.setattr(crib.server.database, "write", watched)
        await crib.call(session, "count")
        assert machine.mark(session) == "boot-1"
        machine.sync()
        await crib.call(session, "count", key="lost")
    assert waits == [True]  # for the first call after the rest, and for no other
    await machine.lose_power()
    async with running(machine.settings, machine.runtime) as crib:
        detail(await crib.call(session, "count", key="lost"), 410, "session_gone")


async def test_a_mark_that_can_not_be_written_lets_no_call_run(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await rest(crib)
        with closing(sqlite3.connect(machine.settings.state_dir / "toolserver.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            told = detail(await crib.call(session, "count", key="one"), 503, "runtime_unavailable")
            assert told["effects"] == "none"
            other.rollback()
        assert (await crib.call(session, "count", key="one")).json()["content"][0]["text"] == "count 1"


async def test_a_machine_that_stops_in_order_loses_no_session(machine: Machine) -> None:
    async with running(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await crib.call(session, "count", key="one")
    machine.sync()
    await machine.boot()
    async with running(machine.settings, machine.runtime) as crib:
        assert (await crib.call(session, "count", key="one")).json()["content"][0]["text"] == "count 1"
        assert (await crib.call(session, "count")).status_code == 200


async def test_a_killed_server_on_the_same_boot_keeps_its_sessions(machine: Machine) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await crib.call(session, "count")
    async with running(machine.settings, machine.runtime) as crib:
        assert (await crib.call(session, "count")).json()["content"][0]["text"] == "count 2"


async def test_a_workspace_that_went_with_the_machine_ends_its_successor(machine: Machine) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session()
        await crib.call(session, "count")
        machine.sync()
    await machine.lose_power()
    machine.runtime.workspaces.clear()
    async with running(machine.settings, machine.runtime) as crib:
        following = detail(await crib.client.get(f"/v1/sessions/{session}"), 410, "session_gone")["successor"]
        await crib.server.reaper.reconcile()
        told = detail(await crib.client.get(f"/v1/sessions/{following}"), 410, "session_gone")
        assert (told["cause"], "successor" in told) == ("node_lost", False)


# -- a clock that is set


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """By so many seconds from the true time."""
    true = time.time

    def set_it(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: true() + seconds)

    return set_it


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_a_clock_that_is_set_between_two_servers_ends_no_session(
    machine: Machine, set_clock: Callable[[float], None], jump: float
) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session, short = await crib.session(ttl_s=600, idle_s=300), await crib.session(ttl_s=0.5)
        await crib.call(session, "count")
    set_clock(jump)
    await asyncio.sleep(0.5)
    async with running(machine.settings, machine.runtime) as crib:
        await crib.server.reaper.tick()
        assert (await crib.call(session, "count")).json()["content"][0]["text"] == "count 2"
        assert detail(await crib.client.get(f"/v1/sessions/{short}"), 410, "session_gone")["cause"] == "expired"


async def test_a_clock_that_is_set_under_a_server_is_noted_for_the_next(
    machine: Machine, set_clock: Callable[[float], None]
) -> None:
    async with crashing(machine.settings, machine.runtime) as crib:
        session = await crib.session(ttl_s=600, idle_s=300)
        before = (await crib.client.get(f"/v1/sessions/{session}")).json()["expires_at"]
        set_clock(3600)
        await crib.server.reaper.note_use()
        after = (await crib.client.get(f"/v1/sessions/{session}")).json()["expires_at"]
        assert datetime.fromisoformat(after) - datetime.fromisoformat(before) > timedelta(minutes=59)
    async with running(machine.settings, machine.runtime) as crib:
        await crib.server.reaper.tick()
        assert (await crib.client.get(f"/v1/sessions/{session}")).json()["expires_at"] == after
