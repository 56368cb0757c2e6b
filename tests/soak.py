"""Many sessions at once for minutes: mixed calls, files, cancels, sessions that come and go, and kills of the server if wanted.

    python -m tests.soak --minutes 10 --sessions 50 --runtime docker [--kills] [--seed N]

It ends with 1 when anything failed but by an honest 429 or 503 (with `--kills`: or was cut off by a kill and is told of afterwards),
when the server's memory grew, or when something is left behind.
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
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.faults.ready_to_fork import ForkedServer

HONEST = {429, 503}
WARM_UP = 0.25  # of the time: memory is compared from then on
GROWTH_MIB = 48.0
_LIMITS = {"memory_mb": 192, "pids": 64, "disk_mb": 16}


@dataclass
class Soak:
    server: ForkedServer
    minutes: float
    sessions: int
    kills: bool
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    cut_off: list[tuple[str, str]] = field(default_factory=list)  # session and call
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds and MiB
    until: float = 0.0
    up: asyncio.Event = field(default_factory=asyncio.Event)  # the server takes requests

    async def run(self) -> None:
        self.until = time.monotonic() + self.minutes * 60
        self.up.set()
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.sessions):
                tasks.create_task(self._client(number))
            tasks.create_task(self._watch(begun))
            if self.kills:
                tasks.create_task(self._kill_now_and_then())
        await self._settle()

    async def _watch(self, begun: float) -> None:
        while time.monotonic() < self.until:
            if self.up.is_set():
                self.memory.append((time.monotonic() - begun, self.server.resident_mib()))
            await asyncio.sleep(1)

    async def _kill_now_and_then(self) -> None:
        while time.monotonic() < self.until - 20:
            await asyncio.sleep(self.chance.uniform(5, 20))
            self.up.clear()
            await asyncio.to_thread(self.server.kill)
            await asyncio.to_thread(self.server.start)
            self.up.set()
            self.done["kill"] += 1
            self.memory.clear()  # of another process now

    async def _client(self, number: int) -> None:
        chance = random.Random(self.chance.random())
        while time.monotonic() < self.until:
            session = await self._open()
            if session is None:
                await asyncio.sleep(1)
                continue
            for turn in range(chance.randint(5, 60)):
                if time.monotonic() >= self.until:
                    break
                await self._turn(session, f"soak-{number}-{session[-6:]}-{turn}", chance)
                await asyncio.sleep(chance.uniform(0, 0.4))
            await self._ask("DELETE", f"/v1/sessions/{session}", (204,), "delete")

    async def _open(self) -> str | None:
        body = {"images": ["workspace"], "limits": _LIMITS, "idle_s": 120}
        answer = await self._ask("POST", "/v1/sessions", (201,), "create", json=body)
        return str(answer.json()["id"]) if answer is not None and answer.status_code == 201 else None

    async def _turn(self, session: str, call: str, chance: random.Random) -> None:
        base = f"/v1/sessions/{session}"
        match chance.randrange(8):
            case 0:
                data = chance.randbytes(chance.randint(1, 200_000))
                await self._ask("PUT", f"{base}/files/f.bin", (200, 201, 204), "upload", content=data)
            case 1:
                await self._ask("GET", f"{base}/files?path=", (200,), "listing")
            case 2:
                await self._call(session, call, "shell_execute", {"command": "seq 1 20000 | sha256sum"})
            case 3:
                await self._call(session, call, "python_execute", {"code": "print('x' * 300_000)"})
            case 4:
                code = {"code": "import time; time.sleep(30)"}
                await self._call(session, call, "python_execute", code, (450,), wait_s=0.2)
                await self._ask("DELETE", f"/v1/calls/{call}", (200,), "cancel")
            case 5:
                await self._call(session, call, "python_execute", {"code": "1 / 0"}, (500,))
            case _:
                await self._call(session, call, "python_execute", {"code": "sum(range(100_000))"})

    async def _call(
        self, session: str, call: str, tool: str, arguments: Any, right: tuple[int, ...] = (200,), wait_s: float = 60
    ) -> None:
        body = {"arguments": arguments, "wait_s": wait_s}
        path, head = f"/v1/sessions/{session}/tools/{tool}", {"Idempotency-Key": call}
        answer = await self._ask("POST", path, right, tool, json=body, headers=head)
        if answer is None:
            self.cut_off.append((session, call))

    async def _ask(
        self, method: str, path: str, right: tuple[int, ...], what: str, **more: Any
    ) -> httpx.Response | None:
        """The answer; None when a kill cut it off."""
        more["headers"] = {"Authorization": f"Bearer {self.server.key}", **more.get("headers", {})}
        kills = self.done["kill"]
        try:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=90, trust_env=False) as client:
                answer = await client.request(method, path, **more)
        except httpx.HTTPError as broken:
            if self.kills and (not self.up.is_set() or self.done["kill"] != kills):
                self.done["cut off"] += 1
                await self.up.wait()
                return None
            self.wrong.append(f"{what}: {broken!r}")
            return None
        self.done[f"{what} {answer.status_code}"] += 1
        after_kill = self.kills and answer.status_code in (404, 409, 410, 450, 500)
        if answer.status_code not in right and answer.status_code not in HONEST and not after_kill:
            self.wrong.append(f"{what}: {answer.status_code} {answer.text[:300]}")
        if answer.status_code in HONEST and "Retry-After" not in answer.headers:
            self.wrong.append(f"{what}: {answer.status_code} without Retry-After")
        return answer

    async def _settle(self) -> None:
        """What was cut off is told of, and every session ended."""
        for _, call in self.cut_off:
            answer = await self._ask("GET", f"/v1/calls/{call}?wait_s=60", (200, 404, 450, 500), "settled")
            if answer is not None and answer.status_code == 450 and answer.json()["detail"]["code"] == "still_running":
                self.wrong.append(f"{call} never ended")
        listed = await self._ask("GET", "/v1/sessions", (200,), "sessions")
        for session in listed.json()["sessions"] if listed is not None else ():
            await self._ask("DELETE", f"/v1/sessions/{session['id']}", (204,), "delete")

    def check_memory(self) -> str:
        late = [mib for at, mib in self.memory if at > self.minutes * 60 * WARM_UP]
        if len(late) < 10:
            return "memory: too short a time to tell"
        third = max(3, len(late) // 3)
        first, last = sorted(late[:third])[third // 2], sorted(late[-third:])[third // 2]
        if last - first > GROWTH_MIB:
            self.wrong.append(f"the server's memory grew from {first:.0f} to {last:.0f} MiB")
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
    soak = Soak(server, asked.minutes, asked.sessions, asked.kills, random.Random(asked.seed))
    try:
        asyncio.run(soak.run())
        told = soak.check_memory()
        server.stop(60)
        soak.wrong += [f"left behind: {what}" for what in left_over(server)]
    finally:
        server.close()
    for what, count in sorted(soak.done.items()):
        sys.stdout.write(f"{count:8} {what}\n")
    sys.stdout.write(f"{told}\n")
    for problem in soak.wrong[:20]:
        sys.stdout.write(f"WRONG {problem}\n")
    sys.stdout.write(f"{len(soak.wrong)} wrong\n" if soak.wrong else "nothing wrong\n")
    if not soak.wrong:
        shutil.rmtree(folder)
    return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
