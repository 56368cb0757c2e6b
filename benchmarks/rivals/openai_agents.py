"""openai-agents' DockerSandboxClient: `docker exec` for each call."""

from __future__ import annotations

from typing import Any

import docker
from agents.sandbox.sandboxes.docker import DockerSandboxClient, DockerSandboxClientOptions
from drive import Loop


class Rival:
    def __init__(self, image: str) -> None:
        self._image, self._loop, self._client = image, Loop(), DockerSandboxClient(docker.from_env())

    def create(self) -> Any:
        async def begin() -> Any:
            session = await self._client.create(options=DockerSandboxClientOptions(self._image, network_mode="none"))
            await session.start()
            return session

        return self._loop(begin())

    def run(self, handle: Any, code: str) -> str:
        return str(self._loop(handle.exec("python3", "-c", code, shell=False, timeout=60)).stdout.decode())

    def close(self, handle: Any) -> None:
        self._loop(self._client.delete(handle))

    def container(self, handle: Any) -> str | None:
        return str(handle._inner.state.container_id)

    def finish(self) -> None:
        """Nothing is kept."""
