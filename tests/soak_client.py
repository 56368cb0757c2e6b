"""One client of a soak: sessions that come and go, mixed calls in them, and a strict look at every answer.

Each call that runs appends its name to a file of its workspace first. So it is known of each in the end how often it ran, and
what it was answered must fit that, kills of the server or not:

    the answer of its kind      ran once
    429, 503, 404               did not run (404 after a kill: it is sent again under its key)
    450 still_running           runs: once, or not yet when it was cancelled
    500 outcome_unknown         only when a kill cut it off; at most once
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.server_process import ServerProcess

HONEST = {429, 503}
_LIMITS = {"memory_mb": 192, "pids": 64, "disk_mb": 16}


@dataclass
class Wire:
    """Requests to a server that is killed now and then, where `kills`; what came of them, and what was wrong."""

    server: ServerProcess
    kills: bool
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    up: asyncio.Event = field(default_factory=asyncio.Event)  # the server takes requests

    async def send(self, method: str, path: str, what: str, **more: Any) -> httpx.Response | None:
        """The answer; None when a kill cut it off, and the server is up again."""
        more["headers"] = {"Authorization": f"Bearer {self.server.key}", **more.get("headers", {})}
        kills = self.done["kill"]
        try:
            async with httpx.AsyncClient(base_url=self.server.url, timeout=90, trust_env=False) as client:
                answer = await client.request(method, path, **more)
        except httpx.HTTPError as broken:
            if self.kills and (not self.up.is_set() or self.done["kill"] != kills):
                self.done["cut off"] += 1
                await self.up.wait()
            else:
                self.wrong.append(f"{what}: {broken!r}")
            return None
        self.done[f"{what} {answer.status_code}"] += 1
        if answer.status_code in HONEST and "Retry-After" not in answer.headers:
            self.wrong.append(f"{what}: {answer.status_code} without Retry-After")
        return answer

    async def ask(
        self, method: str, path: str, right: tuple[int, ...], what: str, **more: Any
    ) -> httpx.Response | None:
        """As `send`, of a request that must be answered so, or by an honest refusal."""
        answer = await self.send(method, path, what, **more)
        if answer is not None and answer.status_code not in right and answer.status_code not in HONEST:
            self.wrong.append(f"{what}: {answer.status_code} {answer.text[:300]}")
        return answer

    async def insist(
        self, method: str, path: str, right: tuple[int, ...], what: str, **more: Any
    ) -> httpx.Response | None:
        """As `ask`, again and again while it is cut off or refused. None when it never was answered."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            answer = await self.ask(method, path, right, what, **more)
            if answer is not None and answer.status_code not in HONEST:
                return answer
            await asyncio.sleep(0.5)
        self.wrong.append(f"{what}: no answer in two minutes")
        return None


@dataclass(frozen=True)
class Work:
    """A call, and the status and code that it is answered with."""

    tool: str
    arguments: dict[str, Any]
    status: int = 200
    code: str = ""
    wait_s: float = 60


def _python(name: str, code: str, *expected: Any) -> Work:
    return Work("python_execute", {"code": f"with open('ran', 'a') as f: f.write('{name}\\n')\n{code}"}, *expected)


def _shell(name: str) -> Work:
    return Work("shell_execute", {"command": f"echo {name} >> ran; seq 1 20000 | sha256sum"})


KINDS: tuple[Callable[[str], Work], ...] = (
    _shell,
    lambda name: _python(name, "print('x' * 300_000)"),
    lambda name: _python(name, "import time; time.sleep(30)", 450, "still_running", 0.2),
    lambda name: _python(name, "1 / 0", 500, "tool_failed"),
    lambda name: _python(name, "sum(range(100_000))"),
    lambda name: _python(name, "sum(range(100_000))"),
)


class Client:
    def __init__(self, wire: Wire, number: int, chance: random.Random, until: float) -> None:
        """`until`: on the monotonic clock."""
        self.wire, self.number, self.chance, self.until = wire, number, chance, until
        self.ran: dict[str, tuple[int, int]] = {}  # how often each call of the session ran, at least and at most

    async def run(self) -> None:
        while time.monotonic() < self.until:
            body = {"images": ["workspace"], "limits": _LIMITS, "idle_s": 240}
            answer = await self.wire.ask("POST", "/v1/sessions", (201,), "create", json=body)
            if answer is None or answer.status_code != 201:
                await asyncio.sleep(1)
                continue
            await self._use(str(answer.json()["id"]))

    async def _use(self, session: str) -> None:
        base, self.ran = f"/v1/sessions/{session}", {}
        for turn in range(self.chance.randint(5, 60)):
            if time.monotonic() >= self.until:
                break
            match self.chance.randrange(8):
                case 0:
                    data = self.chance.randbytes(self.chance.randint(1, 200_000))
                    await self.wire.ask("PUT", f"{base}/files/f.bin", (200, 201, 204), "upload", content=data)
                case 1:
                    await self.wire.ask("GET", f"{base}/files?path=", (200,), "listing")
                case _:
                    name = f"soak-{self.number}-{session[-6:]}-{turn}"
                    await self._call(base, name, self.chance.choice(KINDS)(name))
            await asyncio.sleep(self.chance.uniform(0, 0.4))
        await self._check(base)
        await self.wire.insist("DELETE", base, (204,), "delete")

    async def _call(self, base: str, name: str, work: Work) -> None:
        request = {
            "json": {"arguments": work.arguments, "wait_s": work.wait_s},
            "headers": {"Idempotency-Key": name},
        }
        cut = False
        answer = await self.wire.send("POST", f"{base}/tools/{work.tool}", work.tool, **request)
        while answer is None:
            cut = True
            answer = await self.wire.send("GET", f"/v1/calls/{name}?wait_s={work.wait_s}", "asked for")
            if answer is not None and answer.status_code in HONEST:
                await asyncio.sleep(0.5)
                answer = None
            elif answer is not None and answer.status_code == 404:  # it never ran, and may be sent again
                answer = await self.wire.send("POST", f"{base}/tools/{work.tool}", f"{work.tool} again", **request)
        self.ran[name] = self._judge(name, work, answer, cut=cut)
        if answer.status_code == 450:
            await self.wire.insist("DELETE", f"/v1/calls/{name}", (200,), "cancel")

    def _judge(self, name: str, work: Work, answer: httpx.Response, *, cut: bool) -> tuple[int, int]:
        body = answer.json()
        code = body.get("detail", {}).get("code", "")
        if body.get("sandbox_reset") or body.get("detail", {}).get("sandbox_reset"):
            self.wire.wrong.append(f"{name}: its sandbox is another one")
        if answer.status_code in HONEST:
            return 0, 0
        if (answer.status_code, code) == (work.status, work.code):
            return (0, 1) if work.status == 450 else (1, 1)
        if cut and (answer.status_code, code) == (500, "outcome_unknown"):
            return 0, 1
        if cut and work.status == 450 and answer.status_code == 200:  # it slept to its end meanwhile
            return 1, 1
        self.wire.wrong.append(f"{name} ({work.tool}): {answer.status_code} {answer.text[:300]}")
        return 0, 1

    async def _check(self, base: str) -> None:
        answer = await self.wire.insist("GET", f"{base}/files/ran", (200, 404), "check")
        if answer is None:
            return
        counts = Counter(answer.text.split() if answer.status_code == 200 else [])
        for name, (least, most) in self.ran.items():
            if not least <= counts[name] <= most:
                self.wire.wrong.append(f"{name} ran {counts[name]} times; its answers say {least} to {most}")
        self.wire.done["calls checked"] += len(self.ran)
