"""The lines of the README that speak to a ToolServer work as they stand there, but for the port."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.agent_process import clean_environment
from tests.server_process import ServerProcess

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")

pytestmark = [pytest.mark.bubblewrap, pytest.mark.timeout(120)]


def test_the_lines_with_curl_work(toolserver: ServerProcess, tmp_path: Path) -> None:
    (block,) = (block for block in re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL) if "curl" in block)
    assert "http://127.0.0.1:8500" in block
    lines = block.replace("http://127.0.0.1:8500", toolserver.url).replace("curl -s", "curl -sS --fail")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", lines], cwd=tmp_path, env=clean_environment(TOOLSERVER_API_KEY=toolserver.key),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "3." in done.stdout  # the version of Python
