"""Files of a session over HTTP: streamed both ways, ranges on reading. The worker in the sandbox judges every path."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from toolserver.api import wire
from toolserver.api.answers import json_answer
from toolserver.api.body import Upload
from toolserver.api.services import caller
from toolserver.api.sessions import find
from toolserver.errors import Code, ToolServerError, invalid
from toolserver.sessions import files

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_MAX_PATH = 4096


async def listing(request: Request) -> Response:
    session = await find(request, "read")
    query = wire.read_query(wire.ListingQuery, request.query_params.multi_items())
    return json_answer(await files.listing(session, _checked(query.path), query.limit))


async def get(request: Request) -> Response:
    session = await find(request, "read")
    opened = await files.download(session, _path(request))
    size = opened.size
    try:
        span = _span(request.headers.get("range"), size)
    except ToolServerError:
        await opened.close()
        raise
    start, length = span or (0, size)
    headers = {"Content-Length": str(length), "Accept-Ranges": "bytes", "Content-Disposition": "attachment"}
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{start + length - 1}/{size}"
    status = 200 if span is None else 206
    return StreamingResponse(opened.stream(start, length), status, headers, media_type="application/octet-stream")


async def put(request: Request) -> Response:
    session = await find(request, "use")
    path = _path(request)
    upload = Upload(request)
    size, new = await files.upload(session, path, upload.chunks(), upload.check)
    return json_answer({"path": path, "bytes": size}, 201 if new else 200)


async def delete(request: Request) -> Response:
    session = await find(request, "use")
    await files.delete(session, _path(request))
    return Response(status_code=204)


async def get_archive(request: Request) -> Response:
    session = await find(request, "read")
    opened = await files.download_archive(session)
    return StreamingResponse(
        opened.stream(0, None), 200, {"Content-Disposition": "attachment"}, media_type="application/x-tar"
    )


async def put_archive(request: Request) -> Response:
    session = await find(request, "use")
    upload = Upload(request)
    return json_answer({"files": await files.upload_archive(session, upload.chunks(), upload.check)})


async def not_a_file(request: Request) -> Response:
    """PUT and DELETE of the folder itself."""
    caller(request, "use")
    await find(request, "use")
    raise invalid("path", "names no file: put its path behind /files/")


def _path(request: Request) -> str:
    """The file's path as it was sent. The decoded path of the request would hide bytes that are not UTF-8."""
    _, found, raw = request.scope["raw_path"].partition(b"/files/")
    try:
        path = unquote_to_bytes(raw).decode("utf-8") if found else ""
    except UnicodeDecodeError as problem:
        raise invalid("path", "is not UTF-8") from problem
    return _checked(path)


def _checked(path: str) -> str:
    if "\0" in path:
        raise invalid("path", "has a NUL character")
    if len(path.encode("utf-8", "replace")) > _MAX_PATH:
        raise invalid("path", f"is longer than {_MAX_PATH} bytes")
    return path


def _span(header: str | None, size: int) -> tuple[int, int] | None:
    """Start and length; None for the whole, also when the header asks for what is not served (then it is ignored)."""
    found = _RANGE.fullmatch(header.strip()) if header is not None else None
    if found is None or found[1] == found[2] == "":
        return None
    if found[1] == "":
        length = min(int(found[2]), size)
        start = size - length
    else:
        start = int(found[1])
        last = min(int(found[2]), size - 1) if found[2] else size - 1
        if found[2] and int(found[2]) < start:
            return None  # no valid range
        length = last - start + 1
    if length <= 0 or start >= size:
        message = f"The range lies outside of the file, which has {size} bytes."
        raise ToolServerError(Code.RANGE_NOT_SATISFIABLE, message, extra={"content_range": f"bytes */{size}"})
    return start, length
