"""`web_fetch` through the whole server and a real sandbox, against a page server of this machine that the operator allows."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.server_process import ServerProcess

PAGE = b"""<!doctype html><html><head><title>The tool crib</title></head><body><h1>Issue desk</h1>
<p>Tools are issued <a href="/rules">by the rules</a>.</p></body></html>"""


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has in the base class
        """Said to nobody."""


def _gateway() -> str:
    """The address under which a container on the engine's bridge sees this machine."""
    command = ["docker", "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return said or "172.17.0.1"  # an engine that was not configured names none


@dataclass
class Place:
    server: ServerProcess
    site: str  # host:port that may be fetched
    other: str  # host:port of the same machine that may not

    def session(self, client: httpx.Client, **body: object) -> str:
        answer = client.post("/v1/sessions", json={"ttl_s": 300, **body})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def fetch(self, client: httpx.Client, session: str, url: str, **arguments: object) -> httpx.Response:
        body = {"arguments": {"url": url, **arguments}, "wait_s": 60, "deadline_s": 60}
        return client.post(f"/v1/sessions/{session}/tools/web_fetch", json=body)


@pytest.fixture(
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    host = _gateway() if request.param == "docker" else "127.0.0.1"
    sites = [ThreadingHTTPServer((host, 0), _Pages) for _ in range(2)]
    for site in sites:
        threading.Thread(target=site.serve_forever, daemon=True).start()
    allowed, other = (f"{host}:{site.server_address[1]}" for site in sites)
    settings = {"TOOLSERVER_EGRESS__ALLOW_PRIVATE": f'["{allowed}"]'}
    server = ServerProcess(request.param, tmp_path_factory.mktemp(f"web-{request.param}"), settings).start()
    yield Place(server, allowed, other)
    server.end()
    for site in sites:
        site.shutdown()
        site.server_close()


@pytest.fixture(scope="module")
def session(place: Place) -> Iterator[str]:
    with place.server.client() as client:
        session = place.session(client, egress={"mode": "open"})
        yield session
        client.delete(f"/v1/sessions/{session}")
    place.server.wait_no_leftovers(session)


def test_a_page_that_the_operator_allows_comes_as_markdown(place: Place, session: str) -> None:
    with place.server.client() as client:
        answer = place.fetch(client, session, f"http://{place.site}/")
        assert answer.status_code == 200, answer.text
    text = "\n".join(block["text"] for block in answer.json()["content"])
    assert "Issue desk" in text
    assert "<h1>" not in text
    assert "The tool crib" in answer.text
    assert f"http://{place.site}/rules" in answer.text


@pytest.mark.parametrize(
    "url",
    ["http://{other}/", "http://169.254.169.254/latest/meta-data/", "http://127.0.0.1:1/", "http://{site}/away"],
)
def test_what_is_not_public_is_denied_also_behind_a_redirect(place: Place, session: str, url: str) -> None:
    with place.server.client() as client:
        answer = place.fetch(client, session, url.format(site=place.site, other=place.other))
    assert answer.status_code == 500, answer.text
    detail = answer.json()["detail"]
    assert (detail["code"], detail["fault"], detail["retryable"]) == ("policy_denied", "policy", False)
    assert "refused" in detail["message"]


def test_without_egress_nothing_is_fetched_and_the_answer_says_how_to_get_it(place: Place) -> None:
    with place.server.client() as client:
        session = place.session(client)
        answer = place.fetch(client, session, f"http://{place.site}/")
        detail = answer.json()["detail"]
        assert (answer.status_code, detail["code"], detail["effects"]) == (500, "policy_denied", "none")
        assert "/egress" in detail["message"]
        client.delete(f"/v1/sessions/{session}")


def test_the_network_is_the_web_tools_alone(place: Place, session: str) -> None:
    host, port = place.site.rsplit(":", 1)
    code = f"import socket\ntry:\n    socket.create_connection(({host!r}, {port}), 3); print('reached')\nexcept OSError as e: print('none')"
    with place.server.client() as client:
        body = {"arguments": {"code": code}}
        answer = client.post(f"/v1/sessions/{session}/tools/python_execute", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["structured"]["stdout"] == "none\n"
