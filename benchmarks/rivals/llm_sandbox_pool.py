"""llm-sandbox with its pool of containers that were started ahead."""

from __future__ import annotations

from typing import Any

from llm_sandbox.pool import PoolConfig, PooledSandboxSession, create_pool_manager
from llm_sandbox_session import RUNTIME


class Rival:
    def __init__(self, image: str) -> None:
        self._pool = create_pool_manager(
            backend="docker",
            config=PoolConfig(max_pool_size=12, min_pool_size=10),
            lang="python",
            image=image,
            skip_environment_setup=True,
            runtime_configs=RUNTIME,
        )

    def create(self) -> Any:
        session = PooledSandboxSession(pool_manager=self._pool)
        session.open()
        return session

    def run(self, handle: Any, code: str) -> str:
        return str(handle.run(code).stdout)

    def close(self, handle: Any) -> None:
        handle.close()

    def container(self, handle: Any) -> str | None:
        return str(handle._pooled_container.container_id)

    def finish(self) -> None:
        self._pool.close()
