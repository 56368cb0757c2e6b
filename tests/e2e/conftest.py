from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agent_process import AgentFolder, scripted_model
from tests.server_process import ServerProcess

COUNTING = Path(__file__).with_name("counting.toml")


@pytest.fixture(scope="session")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a model that has four lines added to a file, one a step. It keeps nothing between runs."""
    with scripted_model(COUNTING, tmp_path_factory.mktemp("counting")) as url:
        yield url


@pytest.fixture(scope="session")
def quick_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same without the moments that it takes, for what nobody is to be killed in."""
    folder = tmp_path_factory.mktemp("quick")
    script = folder / "quick.toml"
    script.write_text(re.sub(r"(?m)^quirks = .*\n|; sleep [\d.]+", "", COUNTING.read_text()))
    with scripted_model(script, folder) as url:
        yield url


@pytest.fixture(scope="session")
def toolserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A ToolServer that runs apart from any agent, on bubblewrap."""
    server = ServerProcess("bubblewrap", tmp_path_factory.mktemp("toolserver"))
    server.start()
    yield server
    server.end()


@pytest.fixture
def agent(tmp_path: Path, counting_model: str, quick_model: str) -> AgentFolder:
    """Without a ToolServer's address: each command starts its own, on bubblewrap."""
    settings = {
        "AGENT_LLM__MODEL": "counting",
        "AGENT_LLM__BASE_URL": counting_model,
        "AGENT_TOOLSERVER__RUNTIME": "bubblewrap",
    }
    return AgentFolder(tmp_path, settings, quick_model)


@pytest.fixture
def remote(agent: AgentFolder, toolserver: ServerProcess) -> AgentFolder:
    """The same with the ToolServer that runs apart."""
    agent.settings |= {"AGENT_TOOLSERVER__URL": toolserver.url, "AGENT_TOOLSERVER__API_KEY": toolserver.key}
    return agent
