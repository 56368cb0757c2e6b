"""MCP servers of PyPI as they are published, called over HTTP in sandboxes of a Docker engine; one of them reaches out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.bridge_site import on_the_bridge
from tests.real_servers.bench import Bench, serving, state_with
from tests.unit.toolserver.crib import detail
from toolserver.store import keys

# it refuses addresses that are not public by itself too, and the tests' site has no other
FETCH = "python3 -m mcp_server_fetch --allow-private-ips"
PAGE = b"<html><body><h1>Tea</h1><p>Boil <b>water</b> first.</p></body></html>"
pytestmark = pytest.mark.docker


class _Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/tea"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE) if found else 0))
        self.end_headers()
        self.wfile.write(PAGE if found else b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has in the base class
        """Said to nobody."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with on_the_bridge(_Site) as address:
        yield address


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory, site: str) -> Path:
    return state_with(
        tmp_path_factory.mktemp("added") / "state",
        time=(),
        git=("--workspace", "rw", "--deadline-s", "20"),
        fetch=("--egress", site, "--command", FETCH),
        shared_fetch=("fetch", "--egress", site, "--scope", "shared", "--command", FETCH),
        memory=("--env", "MEMORY_FILE_PATH=/tmp/memory.jsonl", "--scope", "shared"),
    )


@pytest.fixture
async def bench(tmp_path: Path, state: Path, site: str) -> AsyncIterator[Bench]:
    async with serving(tmp_path, state, egress={"allow_private": [site]}) as bench:
        yield bench


async def test_time_is_told_and_turned_into_another(bench: Bench) -> None:
    session = await bench.session("time")
    now = json.loads(await bench.text(session, "get_current_time", {"timezone": "Etc/UTC"}))
    assert (now["timezone"], now["is_dst"]) == ("Etc/UTC", False)
    asked = {"source_timezone": "Europe/Berlin", "time": "12:30", "target_timezone": "Asia/Kolkata"}
    turned = json.loads(await bench.text(session, "convert_time", asked))
    assert turned["target"]["datetime"][11:16] in ("16:00", "17:00")
    unknown = await bench.call(session, "get_current_time", {"timezone": "Nowhere/Land"})
    assert "Invalid timezone" in detail(unknown, 500, "tool_failed")["message"]


async def test_git_works_on_the_files_of_the_session(bench: Bench) -> None:
    session = await bench.session("workspace", "git")
    await bench.done(session, "shell_execute", {"command": "git init -q -b main notes && echo one > notes/a.txt"})
    repo = {"repo_path": "/workspace/notes"}
    assert "a.txt" in await bench.text(session, "git_status", repo)
    await bench.done(session, "git_add", {**repo, "files": ["a.txt"]})
    await bench.done(
        session, "shell_execute", {"command": "cd notes; git config user.name A; git config user.email a@b"}
    )
    assert "committed" in await bench.text(session, "git_commit", {**repo, "message": "The first"})
    assert "The first" in await bench.text(session, "git_log", {**repo, "max_count": 1})
    await bench.put(session, "notes/a.txt", b"two\n")
    assert "+two" in await bench.text(session, "git_diff_unstaged", repo)
    seen = await bench.text(session, "shell_execute", {"command": "git -C notes log --format=%s,%an"})
    assert seen == "The first,A\n"
    outside = await bench.call(session, "git_status", {"repo_path": "/etc"})
    detail(outside, 500, "tool_failed")


async def test_a_page_is_fetched_through_the_proxy_and_no_other(bench: Bench, site: str) -> None:
    session = await bench.session("fetch", egress={"allow": [site, "example.org"]})
    page = await bench.text(session, "fetch", {"url": f"http://{site}/tea"})
    assert "Boil water first." in page
    denied = await bench.call(session, "fetch", {"url": "http://example.org/"})  # its image was not granted that one
    assert detail(denied, 500, "policy_denied")["denied"][0]["host"] == "example.org"
    missing = await bench.call(session, "fetch", {"url": f"http://{site}/coffee"})
    assert "404" in detail(missing, 500, "tool_failed")["message"]
    changed = await bench.client.put(f"/v1/sessions/{session}/egress", json={"mode": "none"})
    assert changed.status_code == 200
    shut = await bench.call(session, "fetch", {"url": f"http://{site}/tea"})
    assert detail(shut, 500, "policy_denied")["denied"][0]["rule"] == "none"


async def test_a_shared_one_reaches_what_its_image_was_granted(bench: Bench, site: str) -> None:
    one = await bench.session("shared-fetch", egress={"allow": [site]})
    two = await bench.session("shared-fetch", egress={"allow": [site]})
    for session in (one, two):
        page = await bench.text(session, "shared-fetch.fetch", {"url": f"http://{site}/tea"})
        assert "Boil water first." in page
    none = await bench.session("shared-fetch")
    refused = await bench.call(none, "shared-fetch.fetch", {"url": f"http://{site}/tea"})
    detail(refused, 500, "policy_denied")
    await bench.until_left(3)  # with its sidecar and the proxy


async def test_a_shared_one_is_one_tenants(bench: Bench) -> None:
    one, two = await bench.session("memory"), await bench.session("memory")
    ann = {"name": "Ann", "entityType": "person", "observations": []}
    await bench.done(one, "create_entities", {"entities": [ann]})
    assert (await bench.done(two, "read_graph"))["structured"]["entities"] == [ann]
    text = keys.new_text()
    await bench.server.database.write(lambda connection: keys.ensure(connection, text, "x", "other", "use"))
    head = {"Authorization": f"Bearer {text}"}
    made = await bench.client.post("/v1/sessions", json={"images": ["memory"]}, headers=head)
    place = f"/v1/sessions/{made.json()['id']}/tools/read_graph"
    told = (await bench.client.post(place, json={"arguments": {}, "wait_s": 60}, headers=head)).json()
    assert told["structured"]["entities"] == []
    for session in (one, two):
        assert (await bench.client.delete(f"/v1/sessions/{session}")).status_code in (200, 204)
    fresh = await bench.session("memory")
    assert (await bench.done(fresh, "read_graph"))["structured"]["entities"] == []


async def test_the_deadline_of_an_entry_bounds_that_of_a_call(bench: Bench) -> None:
    session = await bench.session("workspace", "git")
    await bench.done(session, "shell_execute", {"command": "git init -q notes"})
    asked = {"arguments": {"repo_path": "/workspace/notes"}, "deadline_s": 600}
    answer = await bench.client.post(
        f"/v1/sessions/{session}/tools/git_status", json=asked, headers={"Idempotency-Key": "k"}
    )
    assert answer.status_code == 200
    row = await bench.server.executor.stored.find("default", "k")
    assert row is not None
    assert row.deadline_s == 20
