"""llm-sandbox: a container for each session, a process for each call. Without its set-up of packages, its fast mode."""

from __future__ import annotations

from typing import Any

from llm_sandbox import SandboxSession

RUNTIME = {"network_mode": "none", "user": "root"}


class Rival:
    def __init__(self, image: str) -> None:
        self._image = image

    def create(self) -> Any:
        session = SandboxSession(
            lang="python",
            image=self._image,
            skip_environment_setup=True,
            workdir="/sandbox",
            runtime_configs=RUNTIME,
        )
        session.open()
        return session

    def run(self, handle: Any, code: str) -> str:
        return str(handle.run(code).stdout)

    def close(self, handle: Any) -> None:
        handle.close()

    def container(self, handle: Any) -> str | None:
        return str(handle.container.id) if handle.container else None

    def finish(self) -> None:
        """Nothing is kept."""
