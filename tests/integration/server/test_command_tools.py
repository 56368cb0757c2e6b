"""Command-line images as tools of a real server on a Docker engine: one container a call, told the truth, and nothing left."""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.foreign_images import ForeignImages, foreign_images
from tests.unit.toolserver.crib import KEY, crash, detail
from tests.unit.toolserver.crib import running as running_fake
from tests.unit.toolserver.crib import settings as fake_settings
from tests.unit.web.pdf_file import pdf
from toolserver.app import ToolServer
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.cli_template import CliTemplate
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.catalog.secret import SecretSource
from toolserver.egress.policy import EgressPolicy
from toolserver.runtime.docker_runtime import DockerRuntime
from toolserver.settings import RuntimeSettings, Settings

SECRET = "a-secret-of-the-operator"
TEXT = {"type": "string"}
SCRIPT = {"type": "object", "properties": {"script": TEXT, "input": TEXT}, "required": ["script"]}

pytestmark = pytest.mark.docker


def tool_of(image: str, name: str, schema: dict[str, Any]) -> Tool:
    return Tool(name, f"Runs {name}.", schema, None, {}, image)


def cli_image(
    name: str, digest: str, tools: dict[str, tuple[dict[str, Any], dict[str, Any]]], **over: Any
) -> ToolImage:
    """`tools`: template and schema by name."""
    templates = {tool: CliTemplate.load(template) for tool, (template, _) in tools.items()}
    for tool, (_, schema) in tools.items():
        templates[tool].check(schema)
    fields: dict[str, Any] = {
        "name": name, "reference": f"test/{name}:1", "command": (), "workspace": "rw", "egress": EgressPolicy(),
        "start": "lazy", "env": {}, "limits": LimitsOverride(memory_mb=128, pids=32), "kind": "cli", "origin": "added",
        "digest": digest, "tools": tuple(tool_of(name, tool, schema) for tool, (_, schema) in tools.items()), "cli": templates,
    }  # fmt: skip
    return ToolImage(**{**fields, **over})


def shell_image(digest: str) -> ToolImage:
    """Tools that run any script, so that a test can have every end."""
    tools: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "run": ({"argv": ["{script}"], "exit_codes": {"4": "invalid", "5": "done"}}, SCRIPT),
        "run_json": ({"argv": ["{script}"], "output": "json", "stderr": "always"}, SCRIPT),
        "feed": ({"argv": ["{script}"], "stdin": "{input}"}, {**SCRIPT, "required": ["script", "input"]}),
    }
    secrets = {"TOKEN": SecretSource("env", "TOOLCRIB_TEST_TOKEN")}
    return cli_image("shell", digest, tools, secrets=secrets)


@pytest.fixture(scope="module")
def images() -> Iterator[ForeignImages]:
    os.environ["TOOLCRIB_TEST_TOKEN"] = SECRET
    with foreign_images() as made:
        yield made
    del os.environ["TOOLCRIB_TEST_TOKEN"]


@pytest.fixture(scope="module")
def shell(images: ForeignImages) -> ToolImage:
    return shell_image(images.build("FROM base", 'ENTRYPOINT ["sh", "-c"]', "WORKDIR /workspace"))


class Bench:
    def __init__(self, server: ToolServer, client: httpx.AsyncClient) -> None:
        self.server, self.client = server, client

    async def session(self, **body: Any) -> str:
        answer = await self.client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def call(self, session: str, name: str, key: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self.client.post(f"/v1/sessions/{session}/tools/{name}", json=body, headers=headers)

    async def run(self, session: str, script: str, name: str = "run", **body: Any) -> httpx.Response:
        return await self.call(session, name, arguments={"script": script}, **body)

    async def until_containers(self, count: int, limit_s: float = 30) -> None:
        async with asyncio.timeout(limit_s):
            for _ in range(10_000):
                if len(await self.containers()) == count:
                    return
                await asyncio.sleep(0.05)

    async def containers(self) -> list[dict[str, Any]]:
        runtime = self.server.runtime
        assert isinstance(runtime, DockerRuntime)
        mine = {"label": [f"toolcrib.server={runtime._server_id}", "toolcrib.image=shell"]}
        return await runtime.engine.call(lambda client: client.containers(all=True, filters=mine))


@asynccontextmanager
async def serving(folder: Path, *images: ToolImage, crashes: bool = False) -> AsyncIterator[Bench]:
    settings = Settings(
        state_dir=folder, api_key=KEY, pool={"enabled": False}, runtime=RuntimeSettings(name="docker"),
        call={"kill_grace_s": 1}, limits={"disk_mb": 64},
    )  # fmt: skip
    builtin = Catalog.load(settings).images["workspace"]
    server = ToolServer(
        settings,
        DockerRuntime(f"test-{uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex[:12]}", folder, settings.runtime),
        Catalog({one.name: one for one in (builtin, *images)}),
    )
    await server.start()
    try:
        await server.begun.wait()
        transport = httpx.ASGITransport(app=server.asgi, raise_app_exceptions=False)
        head = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=head, timeout=60) as client:
            yield Bench(server, client)
    finally:
        await (crash(server) if crashes else server.close())


@pytest.fixture
async def bench(tmp_path: Path, shell: ToolImage) -> AsyncIterator[Bench]:
    async with serving(tmp_path, shell) as bench:
        yield bench


def files_with(secret: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def text_of(told: dict[str, Any]) -> str:
    return "".join(block["text"] for block in told["content"])


@pytest.fixture(scope="module")
def debian(images: ForeignImages) -> str:
    """An image with plain packages of Debian."""
    install = "apt-get update && apt-get install -y --no-install-recommends jq poppler-utils"
    return images.build("FROM base", "USER root", f"RUN {install}", "USER nobody", network=True)


async def test_a_real_image_with_jq(tmp_path: Path, debian: str) -> None:
    properties: dict[str, Any] = {
        "filter": TEXT,
        "json": TEXT,
        "file": TEXT,
        "compact": {"type": "boolean"},
    }
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": ["filter"],
        "additionalProperties": False,
    }
    argv = [["-c", "{compact?}"], "{filter}", ["{file}"]]
    template: dict[str, Any] = {"argv": argv, "output": "json", "files": ["file"], "exit_codes": {"3": "invalid"}}
    stdin: dict[str, Any] = {"argv": ["{filter}", "--"], "stdin": "{json}"}
    tools = {"jq_file": (template, schema), "jq": (stdin, {**schema, "required": ["filter", "json"]})}
    async with serving(tmp_path, cli_image("jq", debian, tools, command=("jq",))) as bench:
        session = await bench.session()
        put = await bench.client.put(
            f"/v1/sessions/{session}/files/a b.json", content=b'{"x": [1, 2], "y": "\xc3\xbc"}'
        )
        assert put.status_code == 201
        told = (
            await bench.call(session, "jq_file", arguments={"filter": ".", "file": "a b.json", "compact": True})
        ).json()
        assert told.get("structured") == {"x": [1, 2], "y": "ü"}, told
        assert told["content"] == [{"type": "text", "text": '{"x":[1,2],"y":"ü"}\n'}]
        assert told["exit_code"] == 0
        assert told["usage"]["wall_ms"] > 0
        told = (await bench.call(session, "jq", arguments={"filter": ".a", "json": '{"a": "; id"}'})).json()
        assert text_of(told) == '"; id"\n'
        error = detail(
            await bench.call(session, "jq_file", arguments={"filter": "}{", "file": "a b.json"}),
            422,
            "invalid_arguments",
        )
        assert "syntax error" in error["message"]
        error = detail(
            await bench.call(session, "jq_file", arguments={"filter": ".", "file": "../../etc/passwd"}),
            422,
            "invalid_arguments",
        )
        assert error["errors"] == [{"pointer": "/arguments/file", "message": "must be a path in the workspace"}]
        error = detail(await bench.call(session, "jq", arguments={"filter": ".", "json": "{"}), 500, "tool_failed")
        assert error["exit_code"] in (2, 4), error
        assert "parse error" in text_of(error)


async def test_a_real_image_that_reads_and_writes_files(tmp_path: Path, debian: str) -> None:
    schema = {"type": "object", "properties": {"file": TEXT, "into": TEXT}, "required": ["file"]}
    both = {**schema, "required": ["file", "into"]}
    tools = {
        "pdf_text": ({"argv": ["pdftotext", "{file}", "-"], "files": ["file"]}, schema),
        "pdf_picture": (
            {"argv": ["pdftoppm", "-png", "-singlefile", "{file}", "{into}"], "files": ["file", "into"]},
            both,
        ),
    }
    async with serving(tmp_path, cli_image("pdf", debian, tools)) as bench:
        session = await bench.session()
        await bench.client.put(f"/v1/sessions/{session}/files/in.pdf", content=pdf("Hello from a page"))
        told = (await bench.call(session, "pdf_text", arguments={"file": "in.pdf"})).json()
        assert "Hello from a page" in text_of(told)
        assert (
            await bench.call(session, "pdf_picture", arguments={"file": "in.pdf", "into": "page"})
        ).status_code == 200
        picture = await bench.client.get(f"/v1/sessions/{session}/files/page.png")
        assert picture.content.startswith(b"\x89PNG")


async def test_how_a_command_ends_is_how_the_call_ends(bench: Bench) -> None:
    session = await bench.session()
    told = (await bench.run(session, "echo out; echo err >&2; exit 5")).json()
    assert (text_of(told), told["exit_code"]) == ("out\n", 5)
    error = detail(await bench.run(session, "echo out; echo err >&2; exit 7"), 500, "tool_failed")
    assert (text_of(error), error["exit_code"]) == ("out\nstderr:\nerr\n", 7)
    error = detail(await bench.run(session, "echo no such thing >&2; exit 4"), 422, "invalid_arguments")
    assert "no such thing" in error["message"]
    detail(await bench.run(session, "python3 -c 'x = bytearray(300 << 20)'; exit 0"), 500, "oom_killed")
    error = detail(await bench.run(session, "kill -9 $$"), 500, "tool_crashed")
    assert error["exit_code"] == 137
    error = detail(await bench.run(session, "echo '{\"a\": NaN}'", "run_json"), 500, "tool_failed")
    assert "not the JSON" in error["message"]
    assert text_of(error) == '{"a": NaN}\n'
    told = (await bench.run(session, "echo '[1]'; echo note >&2", "run_json")).json()
    assert told["structured"] == [1]
    assert text_of(told) == "[1]\nstderr:\nnote\n"
    told = (await bench.run(session, r"printf 'A\377\000B'")).json()
    assert text_of(told) == "A\\xff\\x00B"
    error = detail(await bench.run(session, "(trap '' TERM HUP; sleep 300) & exit 7"), 500, "tool_failed")
    assert error["exit_code"] == 7
    assert await bench.containers() == []


async def test_input_is_given_whole_and_then_ends(bench: Bench) -> None:
    session = await bench.session()
    big = "x" * 3_000_000
    told = (await bench.call(session, "feed", arguments={"script": "wc -c", "input": big})).json()
    assert text_of(told).strip() == "3000000"
    told = (await bench.call(session, "feed", arguments={"script": "echo deaf", "input": big})).json()
    assert text_of(told) == "deaf\n"
    told = (await bench.run(session, "cat; echo ended")).json()
    assert text_of(told) == "ended\n"


async def test_a_command_that_goes_on_is_killed_with_all_it_started(bench: Bench) -> None:
    session = await bench.session()
    endless = "trap '' TERM; echo begun; (while :; do echo flood >&2; sleep 0.01; done) & while :; do sleep 1; done"
    begun = time.monotonic()
    error = detail(await bench.run(session, endless, deadline_s=1.0), 450, "deadline_exceeded")
    assert time.monotonic() - begun < 20
    assert error["type"] == "timeout"
    assert text_of(error).startswith("begun\nstderr:\nflood\n")
    running = await bench.call(session, "run", "the-key", arguments={"script": endless}, wait_s=1.5)
    assert "begun" in text_of(detail(running, 450, "still_running"))
    told = (await bench.client.delete("/v1/calls/the-key")).json()
    assert (told["cancelled"], told["cancelled_by"]) == (True, "caller")
    assert text_of(told).startswith("begun\n")
    again = await bench.call(session, "run", "the-key", arguments={"script": endless})
    detail(again, 500, "cancelled")
    assert await bench.containers() == []


async def test_long_output_keeps_head_and_tail_and_the_whole_is_a_file(bench: Bench) -> None:
    session = await bench.session()
    told = (await bench.run(session, "seq 300000")).json()
    text = text_of(told)
    assert text.startswith("1\n2\n")
    assert text.endswith("\n300000\n")
    assert len(text) < (64 << 10) + 200
    whole = "".join(f"{number}\n" for number in range(1, 300_001)).encode()
    assert told["truncated"]["bytes_total"] == len(whole)
    artifact = told["artifacts"][0]
    assert (artifact["bytes"], told["truncated"]["artifact"]) == (len(whole), artifact["path"])
    got = await bench.client.get(f"/v1/sessions/{session}/files/{artifact['path']}")
    assert got.content == whole


async def test_output_comes_as_events_while_it_runs(bench: Bench) -> None:
    session = await bench.session()
    body = {"arguments": {"script": "echo one; echo two >&2; sleep 0.2; echo three"}}
    answer = await bench.client.post(
        f"/v1/sessions/{session}/tools/run", json=body, headers={"Accept": "text/event-stream"}
    )
    events = [part.split("\n") for part in answer.text.split("\n\n") if "event:" in part]
    named = [
        (
            next(line[7:] for line in lines if line.startswith("event: ")),
            json.loads(next(line[6:] for line in lines if line.startswith("data: "))),
        )
        for lines in events
    ]
    assert named[0][0] == "started"
    assert "".join(data["text"] for name, data in named if name == "stdout") == "one\nthree\n"
    assert "".join(data["text"] for name, data in named if name == "stderr") == "two\n", named
    assert named[-1][0] == "outcome"
    assert named[-1][1]["status"] == 200


async def test_a_call_is_done_once(bench: Bench) -> None:
    session = await bench.session()
    script = {"script": "echo x >> count; wc -l < count"}
    first, second = await asyncio.gather(*(bench.call(session, "run", "once", arguments=script) for _ in range(2)))
    assert text_of(first.json()) == text_of(second.json()) == "1\n"
    again = await bench.call(session, "run", "once", arguments=script)
    assert again.json() == first.json()


async def test_a_secret_is_used_and_never_told(bench: Bench, tmp_path: Path) -> None:
    session = await bench.session(env={"GIVEN": "by the client"})
    told = (await bench.run(session, 'printf "%s %s" "${#TOKEN}" "${GIVEN:-none}"')).json()
    assert text_of(told) == f"{len(SECRET)} none"
    script = 'echo "<$TOKEN>"; printf a-secret-; sleep 0.3; echo of-the-operator; echo "$TOKEN" >&2; exit 1'
    error = detail(await bench.run(session, script), 500, "tool_failed")
    assert text_of(error) == "<[…]>\n[…]\nstderr:\n[…]\n"
    assert await asyncio.to_thread(files_with, SECRET.encode(), tmp_path) == []


async def test_a_session_that_ends_takes_its_commands_with_it(bench: Bench) -> None:
    session = await bench.session()
    call = asyncio.create_task(bench.run(session, "sleep 300"))
    await bench.until_containers(1)
    assert (await bench.client.delete(f"/v1/sessions/{session}")).status_code == 204
    detail(await call, 410, "session_gone")
    await bench.until_containers(0)


async def test_a_server_that_died_in_mid_call_does_not_run_it_again(tmp_path: Path, shell: ToolImage) -> None:
    async with serving(tmp_path, shell, crashes=True) as bench:
        session = await bench.session()
        begin = {"arguments": {"script": "echo x >> count; sleep 300"}, "wait_s": 0}
        detail(await bench.call(session, "run", "cut", **begin), 450, "still_running")
        await bench.until_containers(1)
    async with serving(tmp_path, shell) as bench:
        answer = await bench.client.get("/v1/calls/cut?wait_s=20")
        assert detail(answer, 500, "outcome_unknown")["effects"] == "possible"
        await bench.until_containers(0)
        assert text_of((await bench.run(session, "echo again")).json()) == "again\n"


async def test_an_image_that_is_gone_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, shell_image("sha256:" + "0" * 64)) as bench:
        session = await bench.session()
        error = detail(await bench.run(session, "true"), 503, "runtime_unavailable")
        assert "docker pull" in error["message"]
        assert error["effects"] == "none"


async def test_other_runtimes_refuse_added_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Catalog({"shell": shell_image("sha256:0")})
    monkeypatch.setattr("tests.unit.toolserver.crib.catalog", lambda: made)
    async with running_fake(fake_settings(tmp_path)) as crib:
        answer = await crib.client.post("/v1/sessions", json={"images": ["shell"]})
        error = detail(await crib.call(answer.json()["id"], "run", {"script": "true"}), 503, "runtime_unavailable")
        assert "Docker engine" in error["message"]
