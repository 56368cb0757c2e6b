"""A matplotlib figure through the whole server, on each runtime: a picture, and nothing on stderr that a model would read."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.server_process import ServerProcess


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def test_a_figure_comes_back_as_a_picture_and_in_silence(runtime: str, tmp_path: Path) -> None:
    server = ServerProcess(runtime, tmp_path).start()
    try:
        with server.client() as client:
            session = client.post("/v1/sessions", json={"ttl_s": 60}).json()["id"]
            code = "import matplotlib.pyplot as plt\nplt.plot([1, 4, 9])\nplt.title('Quadrate: größer')\nplt.show()"
            answer = client.post(f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"code": code}})
            assert answer.status_code == 200, answer.text
            picture = next(block for block in answer.json()["content"] if block["type"] == "image")
            assert base64.b64decode(picture["data"]).startswith(b"\x89PNG")
            assert answer.json()["structured"]["stderr"] == ""
    finally:
        server.end()
