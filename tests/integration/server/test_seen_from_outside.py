"""The log, the trace and the spans of a real server process: what they tell, and what they never tell."""

from __future__ import annotations

import base64
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.server_process import ServerProcess

pytestmark = pytest.mark.bubblewrap
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def session_of(client: httpx.Client, **body: Any) -> str:
    answer = client.post("/v1/sessions", json={"ttl_s": 300, "images": ["workspace"], **body})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def call(client: httpx.Client, session: str, code: str, **headers: str) -> httpx.Response:
    path = f"/v1/sessions/{session}/tools/python_execute"
    return client.post(path, json={"arguments": {"code": code}}, headers=headers)


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    spans: ClassVar[list[dict[str, Any]]] = []
    resources: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        told = MessageToDict(ExportTraceServiceRequest.FromString(body))
        for resource in told["resourceSpans"]:
            self.resources.append(resource["resource"])
            for scope in resource["scopeSpans"]:
                self.spans.extend(scope["spans"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_told: object) -> None:
        pass


@contextmanager
def collecting() -> Iterator[str]:
    Collector.spans.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def hex_id(text: str) -> str:
    return base64.b64decode(text).hex()


def test_spans_of_a_call_hang_together_under_the_callers(tmp_path: Path) -> None:
    with collecting() as url:
        server = ServerProcess("bubblewrap", tmp_path, {"OTEL_EXPORTER_OTLP_ENDPOINT": url}).start()
        try:
            with server.client() as client:
                session = session_of(client)
                answer = call(client, session, "1 + 1", **TRACED)
                unsampled = call(client, session, "2", traceparent=f"00-{'1' * 32}-{PARENT}-00")
                failed = call(client, session, "1 / 0", traceparent=f"00-{'2' * 32}-{PARENT}-01")
        finally:
            assert server.stop() == 0
    assert (answer.status_code, unsampled.status_code, failed.status_code) == (200, 200, 500)
    spans = [s for s in Collector.spans if hex_id(s["traceId"]) == TRACE]
    (request,) = [s for s in spans if s["name"] == "POST request"]
    assert hex_id(request["parentSpanId"]) == PARENT
    assert hex_id(request["spanId"]) == answer.headers["traceparent"].split("-")[2]
    assert request["kind"] == "SPAN_KIND_SERVER"
    children = [s for s in spans if s is not request]
    assert {s["name"] for s in children} >= {"sandbox", "store"}
    assert all(s["parentSpanId"] == request["spanId"] for s in children)
    for span in spans:
        assert int(request["startTimeUnixNano"]) - 5e6 <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    told = {a["key"]: a["value"].get("stringValue") for a in children[0]["attributes"]}
    assert told["toolcrib.session_id"] == session
    assert told["toolcrib.call_id"] == answer.json()["call_id"]
    assert not [s for s in Collector.spans if hex_id(s["traceId"]) == "1" * 32]
    broken = [s for s in Collector.spans if hex_id(s["traceId"]) == "2" * 32 and s["name"] == "POST request"]
    assert broken[0]["status"]["code"] == "STATUS_CODE_ERROR"
    started = [s for s in Collector.spans if s["name"] == "start"]
    assert started, "no span of the sandbox's start"
    assert {"key": "service.name", "value": {"stringValue": "toolserver"}} in Collector.resources[0]["attributes"]


def test_a_collector_that_is_away_holds_nothing_up(tmp_path: Path) -> None:
    server = ServerProcess(
        "bubblewrap", tmp_path, {"TOOLSERVER_TELEMETRY__OTLP_ENDPOINT": "http://127.0.0.1:9"}
    ).start()
    try:
        with server.client() as client:
            assert call(client, session_of(client), "1").status_code == 200
    finally:
        assert server.stop(15) == 0


def test_the_log_is_a_json_line_an_event_and_holds_no_secret(tmp_path: Path) -> None:
    canaries = {name: f"canary-{name}-{secrets.token_hex(8)}" for name in ("env", "code", "output", "label", "file")}
    settings = {"TOOLSERVER_LOG__LEVEL": "debug", "TOOLSERVER_LOG__FORMAT": "json"}
    server = ServerProcess("bubblewrap", tmp_path, settings).start()
    try:
        with server.client() as client:
            session = session_of(client, env={"SECRET": canaries["env"]}, labels={"a": canaries["label"]})
            code = f"import os; print(os.environ['SECRET'], '{canaries['code']}'); {canaries['output']!r}"
            answer = call(client, session, code, **TRACED, **{"Idempotency-Key": "logged-1", "X-Request-Id": "asked-1"})
            assert canaries["output"] in answer.text
            call(client, session, f"raise ValueError({canaries['output']!r})")
            call(client, session, "import os; os.kill(os.getpid(), 9)")
            bad = client.post(
                f"/v1/sessions/{session}/tools/python_execute", json={"arguments": {"x": canaries["code"]}}
            )
            assert bad.status_code == 422
            client.put(f"/v1/sessions/{session}/files/f", content=canaries["file"].encode())
            wrong = client.get("/v1/tools", headers={"Authorization": "Bearer wrong-canary-key"})
            assert wrong.status_code == 401
            client.delete(f"/v1/sessions/{session}")
    finally:
        assert server.stop() == 0
    log = server.log()
    for secret in (*canaries.values(), server.key, "wrong-canary-key"):
        assert secret not in log
    entries = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert all({"time", "level", "event"} <= set(entry) for entry in entries)
    requests = [entry for entry in entries if entry["event"] == "request"]
    (of_call,) = [entry for entry in requests if entry.get("request_id") == "asked-1"]
    expected = {
        "level": "info", "method": "POST", "status": 200, "trace_id": TRACE, "session_id": session, "tenant": "default",
        "call_id": "logged-1", "path": f"/v1/sessions/{session}/tools/python_execute",
    }  # fmt: skip
    assert {name: of_call[name] for name in expected} == expected
    assert of_call["span"] == answer.headers["traceparent"].split("-")[2]
    assert of_call["ms"] > 0
    assert of_call["bytes"] == len(answer.content)
    assert len([entry for entry in requests if entry["status"] == 401]) == 1
    assert "session_created" in {entry["event"] for entry in entries}


def test_a_wrong_format_is_told_by_its_name(tmp_path: Path) -> None:
    server = ServerProcess("bubblewrap", tmp_path, {"TOOLSERVER_LOG__FORMAT": "xml"})
    with pytest.raises(AssertionError, match="TOOLSERVER_LOG__FORMAT"):
        server.start()
