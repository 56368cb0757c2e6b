"""inspect-ai's docker sandbox: the `docker compose` program for each operation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from drive import Loop
from inspect_ai.util._concurrency import init_concurrency
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._subprocess import init_max_subprocesses

COMPOSE = """
services:
  default:
    image: {image}
    x-local: true
    init: true
    entrypoint: []
    command: tail -f /dev/null
    user: root
    network_mode: none
    stop_grace_period: 1s
"""


class Rival:
    def __init__(self, image: str) -> None:
        self._loop, self._folder = Loop(), tempfile.mkdtemp()
        self._config = str(Path(self._folder, "compose.yaml"))
        Path(self._config).write_text(COMPOSE.format(image=image))

        async def begin() -> None:
            init_concurrency()
            init_max_subprocesses(8)
            await DockerSandboxEnvironment.task_init("bench", self._config)

        self._loop(begin())

    def create(self) -> Any:
        return self._loop(DockerSandboxEnvironment.sample_init("bench", self._config, {}))

    def run(self, handle: Any, code: str) -> str:
        sandbox = next(iter(handle.values()))
        return str(self._loop(sandbox.exec(["python3", "-c", code], timeout=60)).stdout)

    def close(self, handle: Any) -> None:
        self._loop(DockerSandboxEnvironment.sample_cleanup("bench", self._config, handle, False))

    def container(self, _handle: Any) -> str | None:
        return None

    def finish(self) -> None:
        self._loop(DockerSandboxEnvironment.task_cleanup("bench", self._config, True))
