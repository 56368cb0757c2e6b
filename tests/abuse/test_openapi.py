"""Requests made from the server's own OpenAPI document, of the right shape and of wrong ones: none of them is an internal error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from tests.abuse.arena import LEAKS
from tests.server_process import ServerProcess

EXAMPLES = 8  # of each operation, mode and kind of session
BY_ITS_TOOL = {"tool_failed", "tool_crashed", "oom_killed", "disk_full", "policy_denied", "cancelled"}
HONEST_503 = {"no_capacity", "quota_exceeded", "draining", "starting"}
MODES = ["positive", "negative"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess("fake", tmp_path_factory.mktemp("openapi")).start()
    yield process
    assert process.stop() == 0
    assert '"level": "error"' not in process.log(), process.log()[-3000:]


def session_of(client: httpx.Client) -> str:
    return str(client.post("/v1/sessions", json={"ttl_s": 600}).json()["id"])


def check_answer(answer: httpx.Response, asked: str) -> None:
    if answer.status_code >= 400:
        body = answer.json()
        code = (body["detail"] if "detail" in body else body["error"].get("data") or {}).get("code")
        if answer.status_code == 500:
            assert code in BY_ITS_TOOL, f"{asked}: {answer.text}"
        elif answer.status_code > 450:
            assert answer.status_code == 501 or code in HONEST_503, f"{asked}: {answer.text}"
    if "json" in answer.headers.get("content-type", ""):
        json.loads(answer.content)
        assert not [leak for leak in LEAKS[:2] if leak in answer.text]


def operations(document: dict[str, Any]) -> list[Any]:
    found = schemathesis.openapi.from_dict(document).get_all_operations()
    return [result.ok() for result in found if isinstance(result, Ok)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("live", [True, False], ids=["live session", "any session"])
def test_no_input_is_an_internal_error(server: ServerProcess, mode: str, live: bool) -> None:
    with server.client(timeout=90) as client:
        document = client.get("/openapi.json").raise_for_status().json()
        session, asked = session_of(client), 0
        for operation in operations(document):
            placed = live and "{session_id}" in operation.path
            if (live and not placed) or (mode == "negative" and not (operation.body or operation.query)):
                continue  # texts in a path can have no wrong shape
            ends = operation.method.lower() == "delete" and operation.path.endswith("{session_id}")
            strategy = operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode.upper()))

            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy, tool=st.sampled_from(["python_execute", "shell_execute", "file_read", "call_wait"]))
            def ask(case: Any, tool: str) -> None:
                if placed and not ends:  # noqa: B023 - called before the loop goes on
                    names = {
                        "session_id": session,
                        **({"tool_name": tool} if "tool_name" in (case.path_parameters or {}) else {}),
                    }
                    case.path_parameters = {**(case.path_parameters or {}), **names}
                try:
                    request = case.as_transport_kwargs(base_url=server.url)
                    sent = client.build_request(
                        request["method"],
                        request["url"],
                        params=request.get("params"),
                        content=request.get("data"),
                        json=request.get("json"),
                        headers={
                            **client.headers,
                            **dict(request.get("headers") or {}),
                            "Authorization": f"Bearer {server.key}",
                        },
                    )
                    answer = client.send(sent)
                except (ValueError, TypeError, httpx.InvalidURL, httpx.LocalProtocolError):
                    return  # what can't be sent as HTTP
                check_answer(answer, f"{request['method']} {request['url']} {request.get('json')!r:.300}")

            ask()
            asked += 1
        assert asked >= 5
        assert client.get("/healthz").status_code == 200
