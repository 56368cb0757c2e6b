"""What a shutdown keeps of the workspaces, when it is asked to."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.toolserver.crib import KEY, catalog, new_runtime, settings
from toolserver.app import ToolServer
from toolserver.errors import StartRefused
from toolserver.serving import ServeOptions, serve


async def shut_down(tmp_path: Path, data: bytes, images: list[str], folder: Path | None, **sections: Any) -> str:
    """A server with one session and one file in it, closed again; the session's id."""
    chosen = settings(tmp_path / "state", **sections)
    server = ToolServer(chosen, new_runtime(chosen), catalog(), keep_workspaces_in=folder)
    await server.start()
    await server.begun.wait()
    transport = httpx.ASGITransport(app=server.asgi)
    head = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://crib", headers=head) as client:
        session_id = str((await client.post("/v1/sessions", json={"images": images})).json()["id"])
        if "workspace" in images:
            assert (await client.put(f"/v1/sessions/{session_id}/files/a/b.txt", content=data)).status_code == 201
    await server.drain()
    await server.close()
    return session_id


async def test_the_workspace_of_a_live_session_is_kept_as_a_tar(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    session_id = await shut_down(tmp_path, b"hello", ["workspace"], folder)
    assert [place.name for place in folder.iterdir()] == [f"{session_id}.tar"]
    archive = folder / f"{session_id}.tar"
    assert archive.stat().st_mode & 0o077 == 0
    with tarfile.open(archive) as tar:
        member = tar.extractfile("a/b.txt")
        assert member is not None
        assert member.read() == b"hello"


async def test_a_workspace_beyond_the_bound_is_not_kept_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    await shut_down(tmp_path, b"x" * 1_048_576, ["workspace"], folder, http={"max_upload_mb": 1})
    assert list(folder.iterdir()) == []
    assert "workspace_not_kept" in caplog.text


async def test_a_folder_that_vanished_does_not_stop_the_shutdown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await shut_down(tmp_path, b"x", ["workspace"], tmp_path / "vanished")
    assert "workspace_not_kept" in caplog.text


async def test_a_session_without_a_workspace_has_nothing_to_keep(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    await shut_down(tmp_path, b"", ["web"], folder)
    assert list(folder.iterdir()) == []


async def test_a_folder_that_cannot_be_made_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ServeOptions(keep_workspaces=tmp_path / "file" / "kept")
    with pytest.raises(StartRefused, match="--keep-workspaces"):
        await serve(settings(tmp_path / "state", http={"port": 0}), options)
