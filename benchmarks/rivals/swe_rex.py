"""SWE-ReX: its server in a container; `execute` starts a process for each call, the REPL is one kept in its shell."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass

from drive import Loop
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest


@dataclass
class Deployed:
    deployment: DockerDeployment
    loop: Loop  # of its own: `start` blocks the loop that it runs in


class Rival:
    def __init__(self, image: str) -> None:
        self._image = image
        logging.disable(logging.CRITICAL)

    def create(self) -> Deployed:
        made = Deployed(
            DockerDeployment(image=self._image, pull="never", docker_args=["--user", "root", "--entrypoint="]), Loop()
        )
        made.loop(made.deployment.start())
        self.begin(made)
        return made

    def begin(self, handle: Deployed) -> None:
        """For a subclass."""

    def run(self, handle: Deployed, code: str) -> str:
        command = Command(command=["python3", "-c", code], timeout=60)
        return str(handle.loop(handle.deployment.runtime.execute(command)).stdout)

    def close(self, handle: Deployed) -> None:
        handle.loop(handle.deployment.stop())

    def container(self, handle: Deployed) -> str | None:
        name = str(handle.deployment.container_name)
        return subprocess.check_output(["docker", "inspect", "-f", "{{.Id}}", name], text=True).strip()

    def finish(self) -> None:
        """Nothing is kept."""


class Repl(Rival):
    def begin(self, handle: Deployed) -> None:
        runtime = handle.deployment.runtime
        handle.loop(runtime.create_session(CreateBashSessionRequest()))
        handle.loop(runtime.run_in_session(_typed("python3 -q")))

    def run(self, handle: Deployed, code: str) -> str:
        return str(handle.loop(handle.deployment.runtime.run_in_session(_typed(code))).output)


def _typed(text: str) -> BashAction:
    return BashAction(command=text, is_interactive_command=True, expect=[">>> "], timeout=60)
