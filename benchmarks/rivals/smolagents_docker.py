"""smolagents' DockerExecutor: Jupyter Kernel Gateway in a container, a new websocket for each call."""

from __future__ import annotations

import socket
from typing import Any

from kernel_gateway import COMMAND
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import DockerExecutor


class Rival:
    def __init__(self, image: str) -> None:
        self._image = image

    def create(self) -> Any:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        return DockerExecutor(
            [],
            AgentLogger(level=LogLevel.OFF),
            port=port,
            image_name=self._image,
            build_new_image=False,
            container_run_kwargs={"command": COMMAND, "user": "root"},
        )

    def run(self, handle: Any, code: str) -> str:
        return str(handle(code).logs)

    def close(self, handle: Any) -> None:
        handle.cleanup()

    def container(self, handle: Any) -> str | None:
        return str(handle.container.id)

    def finish(self) -> None:
        """Nothing is kept."""
