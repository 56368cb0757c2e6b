"""A server offers the browser where its image was built, and says how to get it where it was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server_process import ServerProcess
from toolserver.images.build import build_images
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings

pytestmark = pytest.mark.docker


def test_a_session_has_the_browser_where_its_image_was_built(tmp_path: Path) -> None:
    build_images(["browser"])
    server = ServerProcess("docker", tmp_path).start()
    try:
        with server.client() as client:
            session = client.post("/v1/sessions", json={"ttl_s": 60}).json()
            assert "browser_open" in {tool["name"] for tool in session["tools"]}
            call = f"/v1/sessions/{session['id']}/tools/browser_open"
            answer = client.post(call, json={"arguments": {"url": "http://example.org/"}})
            detail = answer.json()["detail"]
            assert (answer.status_code, detail["code"]) == (500, "policy_denied")  # a session without egress
            client.delete(f"/v1/sessions/{session['id']}")
        server.wait_no_leftovers(session["id"])
    finally:
        server.end()


async def test_an_image_that_the_engine_lacks_is_named_with_what_builds_it(tmp_path: Path) -> None:
    runtime = DockerRuntime("offered", tmp_path, RuntimeSettings())
    try:
        said = await runtime.lacks("browser", "toolcrib/browser:there-is-none", ())
    finally:
        await runtime.close()
    assert said is not None
    assert "toolserver images build browser" in said
