"""`agent mock SCRIPT`: a scripted model as a real OpenAI-compatible HTTP peer, on the standard library's HTTP server.

`POST /v1/chat/completions` (whole or streamed) and `GET /v1/models`. A request that the script does not foresee is answered
500 with the role, the turn and the last message, and `x-should-retry: false`.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent.llm.mock_distortions import DISTORTIONS
from agent.llm.mock_faults import DAMAGES, REFUSALS
from agent.llm.mock_quirks import Quirk
from agent.llm.mock_reply import Delivery, Planned, deliver, error
from agent.llm.mock_request import Asked, ScriptProblem
from agent.llm.mock_script import Memory, Rule, Script, load_script

MAX_BODY_BYTES = 64_000_000
IDLE_S = 300.0
_KEPT_REQUESTS = 1000
_POLL_S = 0.05

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """A request as it came: for tests and for finding out why a script does not fit."""

    at: float
    role: str
    headers: dict[str, str]
    body: dict[str, Any]


class MockServer:
    """A scripted model on its own thread. Use as a context manager, or `start` and `stop`."""

    def __init__(self, script: Script, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None) -> None:
        self.script, self.api_key, self.memory = script, api_key, Memory()
        self.requests: deque[Seen] = deque(maxlen=_KEPT_REQUESTS)
        self.stopping = threading.Event()
        self._http = _HTTPServer((host, port), self)
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """What a client takes as its base URL."""
        host, port = self._http.server_address[:2]
        name = str(host)
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/v1"

    def start(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, name="mock-model", daemon=True)
        self._thread.start()
        return self

    def serve_forever(self) -> None:
        """Serve in this thread until `stop` is called from another one."""
        self._http.serve_forever(poll_interval=_POLL_S)

    def stop(self) -> None:
        """End stalls and the server, and free the port."""
        self.stopping.set()
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def answer(self, asked: Asked) -> Delivery:
        """The script's answer, with the quirks of the script and of the rule that are due."""
        try:
            rule, planned = self.script.choose(asked, self.memory)
            quirks = [quirk for quirk in (*self.script.quirks, *rule.quirks) if self._is_due(quirk, rule, asked)]
            return self._with_quirks(planned, quirks, asked)
        except ScriptProblem as problem:
            log.warning("mock: %s", problem)
            return error(500, f"mock script: {problem}", "mock_script", x_should_retry="false")

    def _is_due(self, quirk: Quirk, rule: Rule, asked: Asked) -> bool:
        if quirk.turns is not None and asked.turn - rule.from_turn >= quirk.turns:
            return False
        return quirk.sends is None or self.memory.sends(f"{rule.name}/{quirk.name}", asked) <= quirk.sends

    def _with_quirks(self, planned: Planned, quirks: list[Quirk], asked: Asked) -> Delivery:
        for quirk in quirks:
            refused = REFUSALS[quirk.name](quirk, asked) if quirk.name in REFUSALS else None
            if refused is not None:
                return refused
        for quirk in quirks:
            if quirk.name in DISTORTIONS:
                DISTORTIONS[quirk.name](quirk, planned, asked)
        delivery = deliver(planned, asked, self.script.model)
        for quirk in quirks:
            if quirk.name in DAMAGES:
                DAMAGES[quirk.name](quirk, delivery)
        return delivery


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], mock: MockServer) -> None:
        self.mock = mock
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        log.debug("mock: the connection of %s ended early", client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "toolcrib-mock"
    timeout = IDLE_S
    # A stream's small frames must leave at once, or each waits for the other side's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _HTTPServer

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        log.debug("mock: %s", format % args)

    def do_GET(self) -> None:
        if self.path.split("?")[0] == "/v1/models":
            model = {"id": self.server.mock.script.model, "object": "model", "created": 0, "owned_by": "toolcrib"}
            self._send(Delivery(body=json.dumps({"object": "list", "data": [model]}).encode()))
        else:
            self._send(
                error(404, f"no such path {self.path}; there are /v1/models and /v1/chat/completions", "not_found")
            )

    def do_POST(self) -> None:
        raw = self._body()
        if raw is None:
            return
        mock = self.server.mock
        if self.path.split("?")[0] != "/v1/chat/completions":
            self._send(error(404, f"no such path {self.path}; POST to /v1/chat/completions", "not_found"))
            return
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if mock.api_key is not None and key != mock.api_key:
            self._send(error(401, "Incorrect API key provided", "invalid_api_key"))
            return
        try:
            body = json.loads(raw)
            role = self.headers.get("X-Toolcrib-Role", "")
            asked = Asked.from_body(body if isinstance(body, dict) else {}, role, key)
        except ValueError as problem:
            self._send(error(400, f"the request is no chat completion: {problem}", "invalid_request"))
            return
        mock.requests.append(Seen(time.time(), role, {k.lower(): v for k, v in self.headers.items()}, body))
        self._send(mock.answer(asked))

    def _body(self) -> bytes | None:
        """The request's body; None when it was refused. Bodies come with a length: clients of this API send one."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._send(
                error(411 if not length else 413, f"a Content-Length of at most {MAX_BODY_BYTES} is needed", "length")
            )
            return None
        return self.rfile.read(int(length))

    def _send(self, delivery: Delivery) -> None:
        if delivery.stall_at == -1 and not self._wait(delivery.stall_s):
            return
        if delivery.drop and delivery.cut_at == 0:
            self._hang_up()
            return
        streamed = delivery.body is None
        self.send_response(delivery.status)
        headers = {"Content-Type": "text/event-stream; charset=utf-8" if streamed else "application/json"}
        headers |= delivery.headers
        headers |= {"Transfer-Encoding": "chunked"} if streamed else {"Content-Length": str(len(delivery.body or b""))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if not streamed:
            if delivery.stall_at == 0 and not self._wait(delivery.stall_s):
                return
            self.wfile.write(delivery.body or b"")
            return
        self._send_frames(delivery)

    def _send_frames(self, delivery: Delivery) -> None:
        for number, frame in enumerate(delivery.frames):
            if number == delivery.cut_at:
                if delivery.drop:
                    self._hang_up()
                    return
                break
            if number == delivery.stall_at and not self._wait(delivery.stall_s):
                return
            self.wfile.write(b"%x\r\n%s\r\n" % (len(frame), frame))
        self.wfile.write(b"0\r\n\r\n")

    def _wait(self, seconds: float) -> bool:
        """Say nothing for a while. False when the client left or the server stops meanwhile."""
        ends_at = time.monotonic() + seconds
        self.wfile.flush()
        while (left := ends_at - time.monotonic()) > 0:
            if self.server.mock.stopping.wait(0):
                self.close_connection = True
                return False
            readable, _, _ = select.select([self.connection], [], [], min(left, _POLL_S))
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                self.close_connection = True
                return False
            if readable:
                time.sleep(min(left, _POLL_S))
        return True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def serve(
    script: Path,
    host: str = "127.0.0.1",
    port: int = 8600,
    *,
    api_key: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a script until interrupted (KeyboardInterrupt passes through). `on_ready` gets the base URL; port 0 takes a free one.

    Raises ScriptInvalid for a bad script and OSError when the address can't be bound.
    """
    server = MockServer(load_script(script), host=host, port=port, api_key=api_key)
    try:
        if on_ready is not None:
            on_ready(server.base_url)
        server.serve_forever()
    finally:
        server.stop()
