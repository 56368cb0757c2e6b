"""The scripted model as an HTTP peer: what any OpenAI client can rely on."""

import http.client
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from agent.llm.mock_script import ScriptInvalid
from agent.llm.mock_server import MockServer
from agent.llm.mock_server import serve as serve_script
from tests.integration.llm.conftest import Serve

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def call(
    server: MockServer, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    place = urlsplit(server.base_url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    try:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
    finally:
        connection.close()


def test_models_are_listed(serve: Serve) -> None:
    status, _, body = call(serve(), "GET", "/v1/models")
    assert (status, [model["id"] for model in json.loads(body)["data"]]) == (200, ["scripted"])


def test_a_whole_completion_has_the_shape_of_openai(serve: Serve) -> None:
    status, headers, body = call(serve(), "POST", "/v1/chat/completions", BODY)
    answer = json.loads(body)
    assert (status, headers["content-type"], answer["object"], answer["model"]) == (
        200,
        "application/json",
        "chat.completion",
        "m",
    )
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


def test_a_stream_ends_with_usage_only_when_asked_for_and_done(serve: Serve) -> None:
    server = serve()
    for options, has_usage in (({"include_usage": True}, True), (None, False)):
        body = {**BODY, "stream": True, **({"stream_options": options} if options else {})}
        status, headers, raw = call(server, "POST", "/v1/chat/completions", body)
        frames = [frame.removeprefix("data: ") for frame in raw.decode().strip().split("\n\n")]
        assert (status, headers["content-type"].split(";")[0], frames[-1]) == (200, "text/event-stream", "[DONE]")
        assert any("usage" in json.loads(frame) for frame in frames[:-1]) is has_usage


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": []}', b'{"messages": [1]}', b"\xff"])
def test_a_body_that_is_no_request_is_a_400(serve: Serve, body: bytes) -> None:
    status, _, answer = call(serve(), "POST", "/v1/chat/completions", body)
    assert status == 400
    assert "message" in json.loads(answer)["error"]


def test_other_paths_are_404_and_say_what_there_is(serve: Serve) -> None:
    server = serve()
    for method in ("GET", "POST"):
        status, _, body = call(server, method, "/v2/other", {} if method == "POST" else None)
        assert status == 404
        assert "/v1/chat/completions" in json.loads(body)["error"]["message"]


def test_a_key_is_asked_for_only_when_one_is_set(serve: Serve) -> None:
    server = serve(api_key="secret")
    assert call(server, "POST", "/v1/chat/completions", BODY)[0] == 401
    assert call(server, "POST", "/v1/chat/completions", BODY, Authorization="Bearer wrong")[0] == 401
    assert call(server, "POST", "/v1/chat/completions", BODY, Authorization="Bearer secret")[0] == 200


def test_one_connection_serves_many_requests(serve: Serve) -> None:
    place = urlsplit(serve().base_url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    for streamed in (True, False) * 3:
        connection.request("POST", "/v1/chat/completions", json.dumps({**BODY, "stream": streamed}))
        response = connection.getresponse()
        assert response.status == 200
        assert response.read()
        assert not response.will_close
    connection.close()


def test_many_clients_at_once_get_the_same_answer(serve: Serve) -> None:
    server = serve()
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: answers.append(call(server, "POST", "/v1/chat/completions", BODY)[2]))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({json.dumps(json.loads(answer)["choices"]) for answer in answers}) == 1
    assert len(answers) == 20


def test_stopping_ends_stalled_answers(serve: Serve) -> None:
    server = serve("never_answers")
    errors: list[Exception] = []

    def wait() -> None:
        try:
            call(server, "POST", "/v1/chat/completions", BODY)
        except (OSError, http.client.HTTPException) as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not server.requests:
        time.sleep(0.01)
    server.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert errors


SCRIPT = """
[[rule]]
name = "count"
  [[rule.reply]]
  text = "one"
  [[rule.reply]]
  text = "two"
"""


def test_a_server_that_was_killed_and_started_again_goes_on_with_the_same_answers(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text(SCRIPT)
    program = (
        "import sys; from pathlib import Path; from agent.llm.mock_server import serve;"
        "serve(Path(sys.argv[1]), port=0, on_ready=lambda url: print(url, flush=True))"
    )
    second_turn = {
        "messages": [*BODY["messages"], {"role": "assistant", "content": "one"}, {"role": "user", "content": "and?"}]
    }
    texts = []
    for body in (BODY, second_turn, BODY):
        process = subprocess.Popen([sys.executable, "-c", program, str(script)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            place = urlsplit(process.stdout.readline().strip())
            connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            texts.append(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
            connection.close()
        finally:
            process.kill()
            process.communicate()
    assert texts == ["one", "two", "one"]


def test_serve_refuses_a_bad_script_and_a_taken_port(serve: Serve, tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text("[[rule]]\n")
    with pytest.raises(ScriptInvalid):
        serve_script(script)
    script.write_text(SCRIPT)
    taken = urlsplit(serve().base_url).port
    with pytest.raises(OSError, match="in use"):
        serve_script(script, port=taken or 0)
