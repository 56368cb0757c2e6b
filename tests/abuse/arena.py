"""One attack on a live server, with what must hold after every attack."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from tests.server_process import CANARY, ServerProcess

LEAKS = (
    r"Traceback \(most recent call last\)",
    r"site-packages/(toolserver|uvicorn|starlette|fastapi|docker)",
    r"/var/lib/docker",
    r"docker\.sock",
)
RESPONSE_CAP = 400_000


@dataclass
class Arena:
    """A session to attack, and a neighbour that must not notice."""

    server: ServerProcess
    client: httpx.Client
    session: dict[str, Any]
    neighbour: str
    answers: list[httpx.Response] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.session["id"])

    @property
    def path(self) -> str:
        return f"/v1/sessions/{self.id}"

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        answer = self.client.request(method, path, **options)
        self.answers.append(answer)
        return answer

    def call(self, tool: str, arguments: Any, *, key: str | None = None, **times: float) -> httpx.Response:
        head = {"Idempotency-Key": key} if key else {}
        return self.request("POST", f"{self.path}/tools/{tool}", json={"arguments": arguments, **times}, headers=head)

    def python(self, code: str, *, deadline_s: float = 20, wait_s: float = 40) -> httpx.Response:
        return self.call("python_execute", {"code": code}, deadline_s=deadline_s, wait_s=wait_s)

    def shell(self, command: str, *, deadline_s: float = 20, wait_s: float = 40) -> httpx.Response:
        return self.call("shell_execute", {"command": command}, deadline_s=deadline_s, wait_s=wait_s)

    def processes(self) -> list[str]:
        """Command lines alive in the sandbox, the interpreter that asks left out."""
        code = (
            "import os\n"
            "def _alive():\n"
            "    found = []\n"
            "    for pid in os.listdir('/proc'):\n"
            "        if pid.isdigit() and int(pid) not in (1, os.getpid()):\n"
            "            try:\n"
            "                state = open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[0]\n"
            "                if state not in 'ZX':\n"
            "                    found.append(open(f'/proc/{pid}/cmdline').read().replace(chr(0), ' '))\n"
            "            except OSError:\n"
            "                pass\n"
            "    return found\n"
            "_alive()"
        )
        answer = self.python(code)
        assert answer.status_code == 200, answer.text
        return [line for line in re.findall(r"'([^']*)'", answer.json()["structured"]["result"]) if line]


def code_of(answer: httpx.Response) -> str:
    return str(answer.json()["detail"]["code"]) if answer.status_code >= 400 else ""


def check_body(answer: httpx.Response, server: ServerProcess) -> None:
    """Invariants vii and viii: valid JSON in UTF-8, bounded, and nothing of the server in it."""
    assert len(answer.content) <= RESPONSE_CAP, f"{len(answer.content)} bytes"
    text = answer.content.decode("utf-8")
    if "json" in answer.headers.get("content-type", ""):
        json.loads(text)
    assert CANARY not in text
    assert server.key not in text
    spoken = answer.status_code == 200 or code_of(answer) in (
        "tool_failed",
        "tool_crashed",
        "deadline_exceeded",
        "still_running",
        "oom_killed",
        "disk_full",
        "cancelled",
    )
    for pattern in LEAKS[1:] if spoken else LEAKS:
        assert not re.search(pattern, text), f"leaks {pattern}: {text[:300]}"
    assert str(server.folder) not in text


class Watch:
    """While an attack runs: /healthz and the neighbour's calls, again and again."""

    def __init__(self, server: ServerProcess, neighbour: str) -> None:
        self.server, self.neighbour = server, neighbour
        self.problems: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        with self.server.client(timeout=20) as client:
            while not self._stop.is_set():
                self._once(client)
                self._stop.wait(0.4)

    def _once(self, client: httpx.Client) -> None:
        begun = time.monotonic()
        try:
            health = client.get("/healthz")
            took = time.monotonic() - begun
            if health.status_code != 200 or took > 2.5:
                self.problems.append(f"/healthz {health.status_code} after {took:.1f} s")
            body = {"arguments": {"code": "6 * 7"}}
            answer = client.post(f"/v1/sessions/{self.neighbour}/tools/python_execute", json=body)
            if answer.status_code != 200 or "42" not in answer.text:
                self.problems.append(f"neighbour: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            self.problems.append(f"{type(error).__name__} {error}")
