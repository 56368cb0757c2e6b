"""A secret header for an https host, in a real session: the host gets it, and nothing else ever shows it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server.town import Town, container_machine, town
from tests.own_engine import why_not
from tests.unit.toolserver.crib import KEY
from toolserver.app import ToolServer
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.cli_template import CliTemplate
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.catalog.secret import HeaderSecret, SecretSource
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings, Settings

SECRET = f"operators-own-{uuid.uuid4().hex}"
SCHEMA = {"type": "object", "properties": {"script": {"type": "string"}}, "required": ["script"]}
FETCH = """
import ssl, urllib.request
def fetch(url, authorities=None):
    context = ssl.create_default_context(cadata=authorities) if authorities else ssl.create_default_context()
    try:
        return urllib.request.urlopen(url, timeout=30, context=context).read().decode()
    except Exception as problem:
        return repr(problem)
"""
LOOK = f"""
import os, subprocess
half = {SECRET[:20][::-1]!r}[::-1]
found = subprocess.run(['grep', '-rlsa', half, '/etc', '/tmp', '/run', '/.toolcrib', '/var', '/opt'], capture_output=True, text=True).stdout
for name in os.listdir('/proc'):
    for what in ('environ', 'cmdline'):
        try:
            if name != str(os.getpid()) and half in open(f'/proc/{{name}}/{{what}}', errors='replace').read():
                found += f'/proc/{{name}}/{{what}} '
        except OSError:
            pass
print('found:', found or None, half in str(os.environ))
"""
pytestmark = [pytest.mark.docker, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    name = f"tc{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        stack.enter_context(container_machine(name))
        yield stack.enter_context(town(name, tmp_path_factory.mktemp("town")))


@pytest.fixture
async def client(tmp_path: Path, there: Town) -> AsyncIterator[httpx.AsyncClient]:
    source = tmp_path / "key"
    source.write_text(f"{SECRET}\n")
    header = HeaderSecret("secure.example", "X-Key", SecretSource.parse(f"file:{source}"), "Token ")
    image = ToolImage(
        name="caller", reference=f"toolcrib/workspace:{version('toolcrib')}", command=("python3", "-c"), workspace="none",
        egress=EgressPolicy("open"), start="lazy", env={}, limits=LimitsOverride(memory_mb=128, pids=32), kind="cli", origin="added",
        digest=None, tools=(Tool("run", "Runs it.", SCHEMA, None, {}, "caller"),), cli={"run": CliTemplate.load({"argv": ["{script}"]})},
        header_secrets=(header,),
    )  # fmt: skip
    state = tmp_path / "state"
    settings = Settings(
        state_dir=state, api_key=KEY, pool={"enabled": False}, runtime=RuntimeSettings(name="docker"),
        egress={"ca_file": there.authority},
    )  # fmt: skip
    runtime = DockerRuntime(f"test-{uuid.uuid4().hex[:12]}", state, settings.runtime, f"container:{there.machine}")
    server = ToolServer(settings, runtime, Catalog({"caller": image}))
    await server.start()
    try:
        await server.begun.wait()
        transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=head, timeout=60) as made:
            yield made
    finally:
        await server.close()
    for file in state.rglob("*"):  # store, journal, and what else it keeps
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file


def _inspected() -> str:
    """All that the engine and this machine's process list tell of what runs."""
    names = subprocess.run(["docker", "ps", "-aq"], capture_output=True, text=True, check=True).stdout.split()
    told = subprocess.run(["docker", "inspect", *names], capture_output=True, text=True, check=False).stdout
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for what in ("cmdline", "environ"):
                try:
                    told += (entry / what).read_text(errors="replace")
                except OSError:
                    continue
    return told


async def test_the_host_gets_the_secret_and_nothing_else_shows_it(
    client: httpx.AsyncClient, there: Town, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def run(script: str) -> str:
        body: dict[str, Any] = {"arguments": {"script": script}, "wait_s": 60}
        answer = await client.post(f"/v1/sessions/{session}/tools/run", json=body)
        assert SECRET not in answer.text
        assert answer.status_code == 200, answer.text
        return "".join(block["text"] for block in answer.json()["content"])

    made = await client.post("/v1/sessions", json={"egress": {"allow": ["secure.example", "other.example"]}})
    session = made.json()["id"]
    said = await run(f"{FETCH}\nprint(fetch('https://secure.example/'))")
    assert f"X-Key: Token {'*' * len(SECRET)}" in said
    heads = [head for _, port, head in there.guests() if port == 443]
    assert len(heads) == 1
    assert heads[0].count(f"X-Key: Token {SECRET}\r\n") == 1
    # another host gets nothing, and its TLS is its own: it is verified without the proxy's authority
    own = there.authority.read_text()
    assert "says hello" in await run(f"{FETCH}\nprint(fetch('https://other.example/', {own!r}))")
    assert "CERTIFICATE_VERIFY_FAILED" in await run(f"{FETCH}\nprint(fetch('https://secure.example/', {own!r}))")
    # nor does it by a redirect
    await run(f"{FETCH}\nprint(fetch('https://secure.example/to?http://other.example/'))")
    assert all(SECRET not in head for _, _, head in there.guests() if "Host: other.example" in head)
    assert any("Host: other.example" in head for _, port, head in there.guests() if port == 80)
    look = asyncio.create_task(run(f"{LOOK}\nimport time; time.sleep(2)"))
    await asyncio.sleep(1.5)
    assert SECRET not in await asyncio.to_thread(_inspected)
    assert (await look).strip() == "found: None False"
    for path in (f"/v1/sessions/{session}", "/v1/tools", "/v1/calls", "/metrics"):
        assert SECRET not in (await client.get(path)).text
    assert SECRET not in caplog.text
    assert there.burnt() == []
    assert (await client.delete(f"/v1/sessions/{session}")).status_code == 204
