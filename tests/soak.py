"""Many sessions at once for minutes: mixed calls, files, cancels, sessions that come and go, and kills of the server if wanted.

    python -m tests.soak --minutes 10 --sessions 50 --runtime docker [--kills] [--seed N]

It ends with 1 when an answer does not fit what became of its call, kills or not (tests/soak_client.py), when anything else failed but by
an honest 429 or 503, when the server's memory grew, or when something is left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.ready_to_fork import ForkedServer
from tests.soak_client import Client, Wire

WARM_UP = 0.25  # of the time: memory is compared from then on
GROWTH_MIB = 48.0


@dataclass
class Soak:
    wire: Wire
    minutes: float
    sessions: int
    chance: random.Random
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds and MiB
    until: float = 0.0

    async def run(self) -> None:
        self.until = time.monotonic() + self.minutes * 60
        self.wire.up.set()
        begun = time.monotonic()
        async with asyncio.TaskGroup() as clients:
            watch = clients.create_task(self._watch(begun))
            for number in range(self.sessions):
                one = Client(self.wire, number, random.Random(self.chance.random()), self.until)
                clients.create_task(one.run())
            if self.wire.kills:
                clients.create_task(self._kill_now_and_then())
        await watch
        await self._end_all()

    async def _watch(self, begun: float) -> None:
        while time.monotonic() < self.until:
            if self.wire.up.is_set():
                self.memory.append((time.monotonic() - begun, self.wire.server.resident_mib()))
            await asyncio.sleep(1)

    async def _kill_now_and_then(self) -> None:
        while time.monotonic() < self.until - 20:
            await asyncio.sleep(self.chance.uniform(5, 20))
            self.wire.up.clear()
            await asyncio.to_thread(self.wire.server.kill)
            await asyncio.to_thread(self.wire.server.start)
            self.wire.done["kill"] += 1
            self.wire.up.set()
            self.memory.clear()  # of another process now

    async def _end_all(self) -> None:
        """Sessions whose creation was cut off have nobody."""
        listed = await self.wire.insist("GET", "/v1/sessions", (200,), "sessions")
        for session in listed.json()["sessions"] if listed is not None else ():
            await self.wire.insist("DELETE", f"/v1/sessions/{session['id']}", (204,), "delete")

    def check_memory(self) -> str:
        late = [mib for at, mib in self.memory if at > self.minutes * 60 * WARM_UP]
        if len(late) < 10:
            return "memory: too short a time to tell"
        third = max(3, len(late) // 3)
        first, last = sorted(late[:third])[third // 2], sorted(late[-third:])[third // 2]
        if last - first > GROWTH_MIB:
            self.wire.wrong.append(f"the server's memory grew from {first:.0f} to {last:.0f} MiB")
        return f"memory: {first:.0f} MiB after the start, {last:.0f} MiB at the end, {max(late):.0f} MiB at most"


def left_over(server: ForkedServer) -> list[str]:
    """What the store names and is still there, once the server has ended."""
    with closing(sqlite3.connect(server.folder / "state" / "toolserver.db")) as database:
        sessions = [
            row[0] for row in database.execute("SELECT session_id FROM sessions WHERE workspace_id IS NOT NULL")
        ]
    until = time.monotonic() + 30
    while (
        left := [what for session in sessions[-200:] for what in server.leftovers(session)]
    ) and time.monotonic() < until:
        time.sleep(1)
    if server.runtime == "docker":
        labelled = ["docker", "ps", "-aq", "--filter", "label=toolcrib.server"]
        volumes = ["docker", "volume", "ls", "-q", "--filter", "label=toolcrib.server"]
        name = _server_label(server)
        for command in (labelled, volumes):
            command[-1] += f"={name}"
            left += subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return left


def _server_label(server: ForkedServer) -> str:
    from toolserver.app import server_id  # noqa: PLC0415 - a soak that only kills does not need it

    return server_id(server.folder / "state")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A ToolServer under many sessions at once: no call lost, run twice or failed but by an honest 503 or 429, memory "
        "flat, nothing left over. Exit code 1 when that does not hold.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long")
    parser.add_argument("--sessions", type=int, default=50, help="how many at once")
    parser.add_argument("--runtime", default="docker", choices=("docker", "bubblewrap"), help="what runs the sandboxes")
    parser.add_argument("--kills", action="store_true", help="kill the server with SIGKILL now and then")
    parser.add_argument("--seed", type=int, help="of what the sessions do; a new one is drawn without it")
    asked = parser.parse_args()
    if asked.seed is None:
        asked.seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {asked.seed}, {asked.sessions} sessions, {asked.minutes:g} min on {asked.runtime}\n")
    folder = Path(tempfile.mkdtemp(prefix="toolcrib-soak-"))
    settings = {
        "TOOLSERVER_SESSION__MAX_SESSIONS": str(asked.sessions + 10),
        "TOOLSERVER_SESSION__MAX_SESSIONS_PER_TENANT": str(asked.sessions + 10),
    }
    server = ForkedServer(asked.runtime, folder, {**os.environ, **settings}).start()
    wire = Wire(server, asked.kills)
    soak = Soak(wire, asked.minutes, asked.sessions, random.Random(asked.seed))
    try:
        asyncio.run(soak.run())
        told = soak.check_memory()
        server.stop(60)
        wire.wrong += [f"left behind: {what}" for what in left_over(server)]
    finally:
        server.close()
    for what, count in sorted(wire.done.items()):
        sys.stdout.write(f"{count:8} {what}\n")
    sys.stdout.write(f"{told}\n")
    for problem in wire.wrong[:20]:
        sys.stdout.write(f"WRONG {problem}\n")
    sys.stdout.write(f"{len(wire.wrong)} wrong\n" if wire.wrong else "nothing wrong\n")
    if not wire.wrong:
        shutil.rmtree(folder)
    return 1 if wire.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
