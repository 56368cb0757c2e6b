"""A whole server in this process on the Docker engine, whose tools are those of images that know nothing of Toolcrib."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner, Result

from tests.real_servers.images import image
from tests.unit.toolserver.crib import KEY
from toolserver.app import ToolServer
from toolserver.cli import app
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings, Settings


def add(state: Path, name: str, *options: str, of: str = "") -> Result:
    """`toolserver tools add` of one of the images (`of`: its name there). Not from within a running loop."""
    command = ["tools", "add", image(of or name), "--name", name, "--yes", "--state-dir", str(state)]
    return CliRunner().invoke(app, [*command, "--memory-mb", "256", "--pids", "64", *options])


def state_with(state: Path, **images: tuple[str, ...]) -> Path:
    """A state folder in which these are added: to be copied by `serving`. Each with its options, and before them its image if it is called otherwise."""
    for name, options in images.items():
        of = next(iter(options), "--").partition("--")[0]
        done = add(state, name.replace("_", "-"), *options[bool(of) :], of=of)
        assert done.exit_code == 0, done.output
    return state


class Bench:
    """Speaks HTTP with the server."""

    def __init__(self, server: ToolServer, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client

    async def session(self, *images: str, **body: Any) -> str:
        answer = await self.client.post("/v1/sessions", json={**({"images": list(images)} if images else {}), **body})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def call(self, session: str, name: str, arguments: Any = None, **more: Any) -> httpx.Response:
        key = more.pop("key", None)
        head = {"Idempotency-Key": key} if key is not None else {}
        body = {"arguments": {} if arguments is None else arguments, "wait_s": 60, **more}
        return await self.client.post(f"/v1/sessions/{session}/tools/{name}", json=body, headers=head)

    async def done(self, session: str, name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
        """The body of the 200 that it must be."""
        answer = await self.call(session, name, arguments, **more)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def text(self, session: str, name: str, arguments: Any = None, **more: Any) -> str:
        """Of the content of a success."""
        return text_of(await self.done(session, name, arguments, **more))

    async def put(self, session: str, path: str, content: bytes) -> None:
        answer = await self.client.put(f"/v1/sessions/{session}/files/{path}", content=content)
        assert answer.status_code in (200, 201), answer.text

    async def get(self, session: str, path: str) -> bytes:
        answer = await self.client.get(f"/v1/sessions/{session}/files/{path}")
        assert answer.status_code == 200, answer.text
        return answer.content

    @property
    def server_id(self) -> str:
        runtime = self.server.runtime
        assert isinstance(runtime, DockerRuntime)
        return runtime._server_id

    async def until_left(self, count: int) -> None:
        """As many containers of the server as these."""
        async with asyncio.timeout(30):
            for _ in range(1000):
                if len(await asyncio.to_thread(left_of, self.server_id, "container ls -a")) == count:
                    return
                await asyncio.sleep(0.1)


def text_of(told: dict[str, Any]) -> str:
    return "".join(block["text"] for block in told["content"])


def left_of(server_id: str, *kinds: str) -> list[str]:
    found: list[str] = []
    for kind in kinds or ("container ls -a", "volume ls"):
        command = ["docker", *kind.split(), "-q", "--filter", f"label=toolcrib.server={server_id}"]
        found += subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return found


def settings(state: Path, **sections: Any) -> Settings:
    return Settings(
        state_dir=state, api_key=KEY, pool={"enabled": False}, runtime=RuntimeSettings(name="docker"),
        **{"call": {"kill_grace_s": 1}, "limits": {"disk_mb": 64}, **sections},
    )  # fmt: skip


@asynccontextmanager
async def serving(folder: Path, state: Path, **sections: Any) -> AsyncIterator[Bench]:
    """On a copy of the state folder. No container and no volume is left at the end."""
    await asyncio.to_thread(shutil.copytree, state, folder / "state")
    chosen = settings(folder / "state", **sections)
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", chosen.state_dir, chosen.runtime)
    server = ToolServer(chosen, runtime)
    await server.start()
    try:
        await server.begun.wait()
        transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=head, timeout=90) as client:
            yield Bench(server, client)
    finally:
        await server.close()
    assert await asyncio.to_thread(left_of, runtime._server_id) == []
