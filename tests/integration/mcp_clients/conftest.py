"""One server with the tools of the workspace and of an added image, for clients of others in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.foreign_images import foreign_images
from tests.integration.mcp_clients.installs import RegistryAway, installed
from tests.integration.mcp_clients.loopback import Loopback, loopback
from tests.server_process import ServerProcess

HERE = Path(__file__).parent
TOOLS = HERE / "conformance_server.py"


@pytest.fixture(scope="session")
def client_folder() -> Callable[[str], Path]:
    """Where a kind of client is installed. Skips where nothing can be installed."""

    def find(kind: str) -> Path:
        try:
            return installed(kind)
        except RegistryAway as problem:
            pytest.skip(f"no registry can be reached, so there is no client: {problem}")

    return find


@pytest.fixture(scope="session")
def added_image() -> Iterator[str]:
    """An image with the tools that the conformance suite calls by name."""
    with foreign_images() as images:
        entry = json.dumps(["python3", "/opt/tools.py"])
        yield images.build("FROM base", "COPY tools.py /opt/", f"ENTRYPOINT {entry}", files={"tools.py": TOOLS})


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, added_image: str) -> Iterator[ServerProcess]:
    """On Docker, with that image added as an operator would."""
    settings = {"TOOLSERVER_POOL__ENABLED": "false", "TOOLSERVER_HTTP__DRAIN_S": "0"}
    process = ServerProcess("docker", tmp_path_factory.mktemp("mcp"), settings)
    tools(process, "add", added_image, "--name", "conformance", "--memory-mb", "128", "--yes")
    process.start()
    try:
        yield process
    finally:
        process.end()


def tools(server: ServerProcess, *arguments: str) -> None:
    """The command `toolserver tools`, on the server's state folder."""
    command = [sys.executable, "-m", "toolserver", "tools", *arguments, "--state-dir", str(server.folder / "state")]
    subprocess.run(command, check=True, timeout=120)


@pytest.fixture(scope="session")
def relay(server: ServerProcess) -> Iterator[Loopback]:
    with loopback(server.url, server.key) as made:
        yield made
