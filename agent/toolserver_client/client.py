"""The ToolServer's HTTP contract, one method an endpoint. No retries here: what to do about an error is the caller's to decide."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Any
from urllib.parse import quote

from agent.toolserver_client.errors import NoAnswer, NoAnswerKind
from agent.toolserver_client.transport import Answer, Download, Transport
from agent.toolserver_client.wire import (
    FileListing,
    RemoteOutcome,
    RemoteTool,
    SessionInfo,
    ToolList,
    read_as,
    read_json,
)


class ToolServerClient:
    """Speaks to one ToolServer with one key. Every method raises ToolServerAnswer or NoAnswer, and ends in bounded time.

    `answer_s` is how long an answer may take beyond the wait that a request names; `transfer_s` bounds one upload or
    download. Requests of one client share a trace id, made from `trace_seed` (the run's id).
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        *,
        connect_s: float = 5.0,
        answer_s: float = 20.0,
        transfer_s: float = 900.0,
        trace_seed: str = "",
    ) -> None:
        self.trace_id = sha256(b"toolcrib-trace\0" + trace_seed.encode("utf-8", "replace")).hexdigest()[:32]
        self._http = Transport(url, api_key, connect_s=connect_s, chunk_s=max(answer_s, 30.0), trace_id=self.trace_id)
        self._connect_s, self._answer_s, self._transfer_s = connect_s, answer_s, transfer_s

    @property
    def url(self) -> str:
        return self._http.url

    async def close(self) -> None:
        await self._http.close()

    # health and tools

    async def alive(self) -> None:
        """Returns when `/healthz` is 2xx."""
        await self._http.request("GET", "/healthz", within_s=self._within(0))

    async def ready(self) -> None:
        """Returns when the server takes calls; a ToolServerAnswer of status 503 says why not."""
        await self._http.request("GET", "/readyz", within_s=self._within(0))

    async def tools(self, session_id: str | None = None) -> list[RemoteTool]:
        path = "/v1/tools" if session_id is None else f"{_session(session_id)}/tools"
        answer = await self._http.request("GET", path, within_s=self._within(0))
        return read_as(ToolList, _json(answer), answer.status).tools

    # sessions

    async def create_session(self, **asked: Any) -> SessionInfo:
        """`asked` are the contract's fields: labels, limits, egress, ... A sandbox may have to start cold."""
        answer = await self._http.request("POST", "/v1/sessions", json=asked, within_s=self._within(60))
        return read_as(SessionInfo, _json(answer), answer.status)

    async def session(self, session_id: str) -> SessionInfo:
        answer = await self._http.request("GET", _session(session_id), within_s=self._within(0))
        return read_as(SessionInfo, _json(answer), answer.status)

    async def delete_session(self, session_id: str, *, within_s: float | None = None) -> None:
        await self._http.request("DELETE", _session(session_id), within_s=within_s or self._within(30))

    # calls

    async def call(
        self, session_id: str, tool: str, arguments: dict[str, Any], *, call_id: str, wait_s: float, deadline_s: float
    ) -> RemoteOutcome:
        """Run a tool under our own id. Sent twice with one id it runs once."""
        answer = await self._http.request(
            "POST",
            f"{_session(session_id)}/tools/{quote(tool, safe='')}",
            json={"arguments": arguments, "wait_s": wait_s, "deadline_s": deadline_s},
            headers={"Idempotency-Key": call_id},
            within_s=self._within(wait_s),
        )
        return _outcome(answer, call_id)

    async def get_call(self, call_id: str, *, wait_s: float = 0.0, after: int | None = None) -> RemoteOutcome:
        """A call's outcome, waiting up to `wait_s` for it. `after` leaves out output before that position."""
        params = {"wait_s": f"{wait_s:g}"} | ({} if after is None else {"after": str(after)})
        answer = await self._http.request("GET", _call(call_id), params=params, within_s=self._within(wait_s))
        return _outcome(answer, call_id)

    async def cancel_call(self, call_id: str) -> RemoteOutcome:
        answer = await self._http.request("DELETE", _call(call_id), within_s=self._within(0))
        return _outcome(answer, call_id)

    # files; paths are relative to the workspace

    async def list_files(self, session_id: str, path: str = "") -> FileListing:
        answer = await self._http.request(
            "GET", f"{_session(session_id)}/files", params={"path": path}, within_s=self._within(10)
        )
        return read_as(FileListing, _json(answer), answer.status)

    def get_file(self, session_id: str, path: str) -> AbstractAsyncContextManager[Download]:
        return self._http.download(
            _file(session_id, path), within_s=self._transfer_s, accept="application/octet-stream, */*"
        )

    async def put_file(self, session_id: str, path: str, content: AsyncIterator[bytes], size: int) -> None:
        """`content` must give exactly `size` bytes; it is sent as it comes."""
        await self._http.request(
            "PUT", _file(session_id, path), content=content, headers=_binary(size), within_s=self._transfer_s
        )

    async def delete_file(self, session_id: str, path: str) -> None:
        await self._http.request("DELETE", _file(session_id, path), within_s=self._within(10))

    def get_archive(self, session_id: str) -> AbstractAsyncContextManager[Download]:
        """The whole workspace as a tar."""
        return self._http.download(
            f"{_session(session_id)}/archive", within_s=self._transfer_s, accept="application/x-tar, */*"
        )

    async def put_archive(self, session_id: str, content: AsyncIterator[bytes], size: int) -> None:
        """Unpack a tar into the workspace: all of it or nothing."""
        headers = _binary(size) | {"Content-Type": "application/x-tar"}
        await self._http.request(
            "PUT", f"{_session(session_id)}/archive", content=content, headers=headers, within_s=self._transfer_s
        )

    def _within(self, wait_s: float) -> float:
        return self._connect_s + wait_s + self._answer_s


def _session(session_id: str) -> str:
    return f"/v1/sessions/{quote(session_id, safe='')}"


def _call(call_id: str) -> str:
    return f"/v1/calls/{quote(call_id, safe='')}"


def _file(session_id: str, path: str) -> str:
    return f"{_session(session_id)}/files/{quote(path, safe='/')}"


def _binary(size: int) -> dict[str, str]:
    return {"Content-Type": "application/octet-stream", "Content-Length": str(size)}


def _json(answer: Answer) -> Any:
    return read_json(answer.body, answer.status)


def _outcome(answer: Answer, call_id: str) -> RemoteOutcome:
    outcome = read_as(RemoteOutcome, _json(answer), answer.status)
    if outcome.call_id != call_id:
        what = f"it answered for the call {outcome.call_id[:80]!r} instead of {call_id}"
        raise NoAnswer(NoAnswerKind.BAD_ANSWER, what, answer.status)
    return outcome
