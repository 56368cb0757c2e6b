"""A server with a state folder of its own that offers the images that were added to another one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import ServerProcess
from tests.unit.toolserver.crib import KEY, catalog, new_runtime, settings
from toolserver.app import ToolServer
from toolserver.errors import StartRefused
from toolserver.store import tool_images
from toolserver.store.connection import database_path
from toolserver.store.database import Database
from toolserver.store.tool_images import Approval, ToolImageRow

LISTED = [{"name": "read_query", "description": "Reads.", "inputSchema": {"type": "object"}}]


@pytest.fixture
def usual(tmp_path: Path) -> Path:
    """A state folder to which an image was added."""
    folder = tmp_path / "usual"
    approval = Approval("a/sqlite:1", "sha256:" + "0" * 64, LISTED, {"read_query": "read_query"}, None, time.time())
    in_database(folder, lambda c: tool_images.put(c, "sqlite", {"image": "a/sqlite:1", "workspace": "rw"}, approval))
    return folder


def in_database(folder: Path, job: Any) -> Any:
    database = Database(database_path(folder))
    database.open()
    try:
        return database.run(job)
    finally:
        database.close()


def row(folder: Path) -> ToolImageRow:
    (found,) = in_database(folder, tool_images.listing)
    assert isinstance(found, ToolImageRow)
    return found


@asynccontextmanager
async def own(tmp_path: Path, usual: Path, unusable: str | None = None) -> AsyncIterator[ToolServer]:
    chosen = settings(tmp_path / "own")
    runtime = new_runtime(chosen)
    runtime.added_problem = lambda: unusable  # type: ignore[method-assign]
    server = ToolServer(chosen, runtime, catalog(), added_images_of=usual)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def listing(server: ToolServer) -> dict[str, Any]:
    transport, head = httpx.ASGITransport(app=server.asgi), {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://crib", headers=head) as client:
        body: dict[str, Any] = (await client.get("/v1/tools")).json()
    return body


def names(body: dict[str, Any]) -> set[str]:
    return {tool["name"] for tool in body["tools"]}


async def test_its_images_are_offered_and_followed(tmp_path: Path, usual: Path) -> None:
    async with own(tmp_path, usual) as server:
        assert "read_query" in names(await listing(server))
        in_database(usual, lambda connection: tool_images.remove(connection, "sqlite"))
        await server.added_images.look()
        assert "read_query" not in names(await listing(server))
    assert in_database(tmp_path / "own", tool_images.listing) == []


async def test_what_is_not_as_it_was_approved_is_noted_there(tmp_path: Path, usual: Path) -> None:
    async with own(tmp_path, usual) as server:
        reason = server.added_images.seen("sqlite", [{**LISTED[0], "description": "Reads, and more."}])
        assert reason is not None
        assert "read_query" not in names(await listing(server))
    drift = row(usual).drift
    assert drift is not None
    assert drift.listed is not None


async def test_where_nothing_was_added_nothing_is_made(tmp_path: Path) -> None:
    async with own(tmp_path, tmp_path / "usual") as server:
        assert "echo" in names(await listing(server))
        await server.added_images.look()
    assert not (tmp_path / "usual").exists()


async def test_a_damaged_database_there_refuses_the_start_and_its_own_can_be_used_again(
    tmp_path: Path, usual: Path
) -> None:
    database_path(usual).write_bytes(b"no database at all" * 500)
    with pytest.raises(StartRefused, match=r"usual/toolserver\.db is damaged"):
        async with own(tmp_path, usual):
            pass
    async with own(tmp_path, tmp_path / "elsewhere"):
        pass


async def test_where_none_can_be_started_they_are_withheld_and_told(tmp_path: Path, usual: Path) -> None:
    async with own(tmp_path, usual, "Added images need Docker.") as server:
        body = await listing(server)
        assert "read_query" not in names(body)
        assert body["withheld"] == [{"image": "sqlite", "state": "unusable", "reason": "Added images need Docker."}]


def test_the_command_finds_the_usual_folder_by_the_settings(tmp_path: Path, usual: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f'state_dir = "{usual}"\n[pool]\nenabled = false\n')
    server = ServerProcess("bubblewrap", tmp_path / "own", {"TOOLSERVER_CONFIG": str(config)}, ("--usual-tools",))
    with_docker = "bubblewrap runs only those of Toolcrib"
    try:
        with server.start().client() as client:
            body = client.get("/v1/tools").json()
            assert with_docker in body["withheld"][0]["reason"]
            session = client.post("/v1/sessions", json={}).json()
            assert "sqlite" not in session["images"]
            answer = client.post(f"/v1/sessions/{session['id']}/tools/read_query", json={"arguments": {}})
            assert answer.status_code == 404
    finally:
        server.end()
    assert not (usual / "server.lock").exists()
    told = subprocess.run(
        [sys.executable, "-m", "toolserver", "doctor", "--runtime", "bubblewrap", "--config", str(config)],
        capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert with_docker in told.stdout
