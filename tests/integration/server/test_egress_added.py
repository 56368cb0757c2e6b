"""Added images reach out through a container beside theirs; a secret header is put in by the proxy and never in a sandbox."""

from __future__ import annotations

import asyncio
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bridge_site import on_the_bridge
from tests.foreign_images import foreign_images
from tests.unit.toolserver.crib import KEY, detail
from toolserver.app import ToolServer
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.cli_template import CliTemplate
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.catalog.secret import HeaderSecret, SecretSource
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings, Settings

SECRET = "the-key-of-the-operator"
SCHEMA = {"type": "object", "properties": {"script": {"type": "string"}}, "required": ["script"]}
pytestmark = pytest.mark.docker


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        said = "with the key" if self.headers.get("Authorization") == f"Bearer {SECRET}" else "without"
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has in the base class
        """Said to nobody."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with on_the_bridge(_Site) as address:
        yield address


@pytest.fixture(scope="module")
def digest() -> Iterator[str]:
    with foreign_images() as made:
        yield made.build("FROM base", 'ENTRYPOINT ["python3", "-c"]')


@pytest.fixture
async def crib(tmp_path: Path, site: str, digest: str) -> AsyncIterator[tuple[ToolServer, httpx.AsyncClient]]:
    os.environ["TOOLCRIB_TEST_KEY"] = SECRET
    template = CliTemplate.load({"argv": ["{script}"]})
    secret = HeaderSecret(site, "Authorization", SecretSource.parse("env:TOOLCRIB_TEST_KEY"), "Bearer ")
    image = ToolImage(
        name="caller", reference="test/caller:1", command=(), workspace="none", egress=EgressPolicy("open"), start="lazy",
        env={}, limits=LimitsOverride(memory_mb=128, pids=32), kind="cli", origin="added", digest=digest,
        tools=(Tool("run", "Runs it.", SCHEMA, None, {}, "caller"),), cli={"run": template}, header_secrets=(secret,),
    )  # fmt: skip
    settings = Settings(
        state_dir=tmp_path, api_key=KEY, pool={"enabled": False}, runtime=RuntimeSettings(name="docker"),
        egress={"allow_private": [site]},
    )  # fmt: skip
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", tmp_path, settings.runtime)
    server = ToolServer(settings, runtime, Catalog({"caller": image}))
    await server.start()
    try:
        await server.begun.wait()
        transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=head, timeout=60) as client:
            yield server, client
    finally:
        await server.close()
        del os.environ["TOOLCRIB_TEST_KEY"]
    left = await asyncio.to_thread(
        subprocess.run,
        f"docker ps -aq --filter label=toolcrib.server={runtime._server_id}; docker volume ls -q --filter label=toolcrib.server={runtime._server_id}",
        shell=True, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert left.stdout == ""


async def test_a_secret_header_reaches_the_host_and_not_the_sandbox(
    crib: tuple[ToolServer, httpx.AsyncClient], site: str
) -> None:
    _, client = crib

    async def run(session: str, script: str) -> httpx.Response:
        body: dict[str, Any] = {"arguments": {"script": script}, "wait_s": 60}
        return await client.post(f"/v1/sessions/{session}/tools/run", json=body)

    made = await client.post("/v1/sessions", json={"egress": {"allow": [site]}})
    session = made.json()["id"]
    fetch = f"import urllib.request; print(urllib.request.urlopen('http://{site}/', timeout=20).read().decode())"
    answer = await run(session, fetch)
    assert answer.status_code == 200, answer.text
    assert "with the key" in answer.text
    look = f"import os, subprocess; print({SECRET!r}[:8] in str(os.environ), os.environ['SSL_CERT_FILE'], os.path.exists(os.environ['SSL_CERT_FILE']))"
    assert "False /.toolcrib/egress/ca.pem True" in (await run(session, look)).text
    denied = await run(session, fetch.replace(site, "example.org"))
    assert detail(denied, 500, "policy_denied")["denied"] == [
        {"host": "example.org", "port": 80, "rule": "not_allowed"}
    ]
    assert (await client.put(f"/v1/sessions/{session}/egress", json={"mode": "none"})).status_code == 200
    shut = detail(await run(session, fetch), 500, "policy_denied")
    assert [one["rule"] for one in shut["denied"]] == ["none"]
    assert (await client.put(f"/v1/sessions/{session}/egress", json={"allow": [site]})).status_code == 200
    assert "with the key" in (await run(session, fetch)).text
