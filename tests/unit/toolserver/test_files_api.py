from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator

import pytest

from tests.unit.toolserver.crib import Crib, detail
from toolserver.api.body import _too_large


async def test_files_go_in_and_out_byte_exact(crib: Crib) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    data = os.urandom(700_001)
    first = await crib.client.put(base + "bin/d%20%C3%BC%23%3F%2541.bin", content=data)
    assert (first.status_code, first.json()) == (201, {"path": "bin/d ü#?%41.bin", "bytes": len(data)})
    got = await crib.client.get(base + "bin/d%20%C3%BC%23%3F%2541.bin")
    assert (got.status_code, got.content) == (200, data)
    assert got.headers["content-length"] == str(len(data))
    assert got.headers["accept-ranges"] == "bytes"
    assert (await crib.client.put(base + "bin/d%20%C3%BC%23%3F%2541.bin", content=b"")).status_code == 200
    assert (await crib.client.get(base + "bin/d%20%C3%BC%23%3F%2541.bin")).content == b""


@pytest.mark.parametrize(
    ("asked", "span"),
    [
        ("bytes=10-19", (10, 20)),
        ("bytes=-5", (95, 100)),
        ("bytes=90-", (90, 100)),
        ("bytes=50-999", (50, 100)),
        ("bytes=-500", (0, 100)),
    ],
)
async def test_a_range_is_206_with_its_place(crib: Crib, asked: str, span: tuple[int, int]) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    data = bytes(range(100))
    await crib.client.put(base + "a", content=data)
    part = await crib.client.get(base + "a", headers={"Range": asked})
    assert (part.status_code, part.content) == (206, data[span[0] : span[1]])
    assert part.headers["content-range"] == f"bytes {span[0]}-{span[1] - 1}/100"


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ("bytes=100-", 416),
        ("bytes=-0", 416),
        ("bytes=5-2", 200),
        ("lines=1-2", 200),
        ("x", 200),
        ("bytes=1-2,4-5", 200),
    ],
)
async def test_odd_ranges_are_ignored_or_416(crib: Crib, asked: str, status: int) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    await crib.client.put(base + "a", content=b"x" * 100)
    answer = await crib.client.get(base + "a", headers={"Range": asked})
    assert answer.status_code == status
    if status == 416:
        detail(answer, 416, "range_not_satisfiable")
        assert answer.headers["content-range"] == "bytes */100"


async def test_listing_and_deleting(crib: Crib) -> None:
    base = f"/v1/sessions/{await crib.session()}/files"
    await crib.client.put(base + "/dir/one.txt", content=b"12345")
    listed = (await crib.client.get(base, params={"path": "dir"})).json()
    assert [(e["name"], e["bytes"]) for e in listed["entries"]] == [("one.txt", 5)]
    assert (await crib.client.get(base)).json()["entries"][0]["kind"] == "dir"
    assert (await crib.client.delete(base + "/dir/one.txt")).status_code == 204
    detail(await crib.client.get(base + "/dir/one.txt"), 404, "file_not_found")
    detail(await crib.client.delete(base + "/dir/one.txt"), 404, "file_not_found")
    detail(await crib.client.get(base, params={"path": "nowhere"}), 404, "file_not_found")


@pytest.mark.parametrize(
    "path", ["..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd", "a%00b", "%FF%FE", "x/" * 3000 + "y", "dir", ""]
)
async def test_paths_that_are_no_file_of_the_workspace_are_422(crib: Crib, path: str) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    await crib.client.put(base + "dir/inner", content=b"x")
    for method in ("GET", "PUT"):
        told = detail(await crib.client.request(method, base + path), 422, "invalid_arguments")
        assert told["errors"][0]["pointer"] == "path"


async def test_the_folder_itself_is_no_target(crib: Crib) -> None:
    base = f"/v1/sessions/{await crib.session()}/files"
    for method in ("PUT", "DELETE"):
        detail(await crib.client.request(method, base), 422, "invalid_arguments")
        detail(await crib.client.request(method, base + "/."), 422, "invalid_arguments")


async def test_an_upload_past_the_workspace_is_413_and_changes_nothing(crib: Crib) -> None:
    session = await crib.session(limits={"disk_mb": 1})
    base = f"/v1/sessions/{session}/files/"
    await crib.client.put(base + "a", content=b"old")
    detail(await crib.client.put(base + "a", content=b"x" * (2 << 20)), 413, "too_large")
    assert (await crib.client.get(base + "a")).content == b"old"


async def test_an_upload_past_the_servers_limit_is_413(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    monkeypatch.setattr("toolserver.api.body.Upload.check", _at_most_a_million)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100_000

    detail(await crib.client.put(base + "a", content=chunks()), 413, "too_large")
    detail(await crib.client.get(base + "a"), 404, "file_not_found")


def _at_most_a_million(_self: object, size: int) -> None:
    if size > 1_000_000:
        raise _too_large(1_000_000)


async def test_the_workspace_goes_out_and_in_as_a_tar(crib: Crib) -> None:
    one, two = await crib.session(), await crib.session()
    await crib.client.put(f"/v1/sessions/{one}/files/a/b.txt", content=b"content")
    out = await crib.client.get(f"/v1/sessions/{one}/archive")
    assert out.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(out.content)) as tar:
        assert tar.getnames() == ["a/b.txt"]
    into = await crib.client.put(f"/v1/sessions/{two}/archive", content=out.content)
    assert (into.status_code, into.json()) == (200, {"files": 1})
    assert (await crib.client.get(f"/v1/sessions/{two}/files/a/b.txt")).content == b"content"


async def test_a_broken_archive_is_422(crib: Crib) -> None:
    path = f"/v1/sessions/{await crib.session()}/archive"
    detail(await crib.client.put(path, content=b"not a tar" * 100), 422, "invalid_arguments")


async def test_a_compressed_body_is_415(crib: Crib) -> None:
    base = f"/v1/sessions/{await crib.session()}/files/"
    detail(
        await crib.client.put(base + "a", content=b"x", headers={"Content-Encoding": "gzip"}),
        415,
        "unsupported_media_type",
    )


async def test_a_session_without_a_workspace_image_has_no_files(crib: Crib) -> None:
    session = await crib.session(images=["foreign"])
    detail(await crib.client.get(f"/v1/sessions/{session}/files/a"), 404, "file_not_found")


async def test_files_still_work_after_the_sandbox_died(crib: Crib) -> None:
    session = await crib.session()
    base = f"/v1/sessions/{session}/files/"
    await crib.client.put(base + "a", content=b"kept")
    await crib.call(session, "die", {})
    assert (await crib.client.get(base + "a")).content == b"kept"


async def test_an_image_that_makes_no_snapshots_says_so(crib: Crib) -> None:
    base = f"/v1/sessions/{await crib.session()}"
    detail(await crib.client.post(base + "/snapshots", json={}), 501, "not_implemented")
    assert (await crib.client.get(base + "/snapshots")).json() == {"snapshots": []}
