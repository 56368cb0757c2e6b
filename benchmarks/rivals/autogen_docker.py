"""AutoGen's DockerCommandLineCodeExecutor: the code as a file in a mounted folder, `docker exec` for each call."""

from __future__ import annotations

import tempfile
from typing import Any

from autogen_core import CancellationToken
from autogen_core.code_executor import CodeBlock
from autogen_ext.code_executors.docker import DockerCommandLineCodeExecutor
from drive import Loop


class Rival:
    def __init__(self, image: str) -> None:
        self._image, self._loop = image, Loop()

    def create(self) -> Any:
        async def begin() -> Any:
            executor = DockerCommandLineCodeExecutor(image=self._image, work_dir=tempfile.mkdtemp(), timeout=60)
            await executor.start()
            return executor

        return self._loop(begin())

    def run(self, handle: Any, code: str) -> str:
        block = CodeBlock(code=code, language="python")
        return str(self._loop(handle.execute_code_blocks([block], CancellationToken())).output)

    def close(self, handle: Any) -> None:
        self._loop(handle.stop())

    def container(self, handle: Any) -> str | None:
        return str(handle._container.id)

    def finish(self) -> None:
        """Nothing is kept."""
