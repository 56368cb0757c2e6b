"""Whole sessions before a small internet: names that lie, change their mind or redirect inwards lead nowhere but to public addresses."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import pytest

from sandbox_images.browser.chromium import PROGRAM
from tests.integration.server.town import Town, container_machine, town
from tests.integration.server.town_sites import OWN, PUBLIC
from tests.own_engine import why_not
from tests.server_process import ServerProcess

INWARDS = [
    "127.0.0.1:8080", "localhost:8080", "[::1]:8080", "0.0.0.0:8080", "2130706433:8080", "0x7f000001:8080", "0177.0.0.1:8080", "127.1:8080",
    "[::ffff:127.0.0.1]:8080", "[::ffff:7f00:1]:8080", "[64:ff9b::7f00:1]:8080", "[2002:7f00:1::]:8080", "①②⑦.⓪.⓪.①:8080", "172.17.0.1:8080",
    "10.213.2.1:80", "169.254.169.254", "metadata.google.internal", "host.docker.internal:8080", "inner.example:8080", "loop.example:8080",
    "six.example:8080", "mapped.example:8080", "nat64.example:8080", "cloud.example", "mixed.example", "own.example:8080", OWN + ":8080", "a.localhost:8080", "public.example@127.0.0.1:8080",
]  # fmt: skip
FETCH = """
import urllib.request, urllib.error, urllib.parse
def fetch(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return f'{answer.status} {answer.read().decode()}'
    except urllib.error.HTTPError as refused:
        return f"{refused.code} {refused.headers['X-Toolcrib-Denied']} {refused.headers['X-Toolcrib-Error']}"
    except Exception as problem:
        return f'{type(problem).__name__} {problem}'
"""
RAW = """
import socket
def raw(host):
    with socket.create_connection(('127.0.0.1', 3128), 30) as door:
        door.sendall(f'GET http://{host}/ HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n'.encode())
        door.shutdown(socket.SHUT_WR)
        return door.makefile('rb').readline().decode().split()[1]
"""
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@dataclass
class Place:
    server: ServerProcess
    client: httpx.Client
    town: Town

    def session(self, *images: str, **egress: object) -> str:
        body = {"ttl_s": 600, "images": list(images) or ["workspace"], "egress": egress or {"mode": "open"}}
        answer = self.client.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def call(self, session: str, tool: str, **arguments: object) -> httpx.Response:
        body = {"arguments": arguments, "wait_s": 90, "deadline_s": 90}
        return self.client.post(f"/v1/sessions/{session}/tools/{tool}", json=body)

    def python(self, session: str, code: str) -> list[str]:
        answer = self.call(session, "python_execute", code=code)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["structured"]["stdout"]).splitlines()


@pytest.fixture(
    scope="module",
    params=[pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)],
)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp(f"town-{request.param}")
    with ExitStack() as stack:
        name = f"tc{uuid.uuid4().hex[:8]}"
        if request.param == "docker":
            stack.enter_context(container_machine(name))
            there = stack.enter_context(town(name, folder / "town"))
            server = ServerProcess("docker", folder, {"TOOLSERVER_EGRESS__DOCKER_NETWORK": f"container:{name}"})
        else:
            subprocess.run(["ip", "netns", "add", name], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
            there = stack.enter_context(town(name, folder / "town"))
            (folder / "resolv.conf").write_text(f"nameserver {there.resolver}\n")
            script = f'mount --bind {folder}/resolv.conf "$(readlink -f /etc/resolv.conf)" && exec "$0" "$@"'
            within = ("nsenter", f"--net=/run/netns/{name}", "unshare", "--mount", "sh", "-c", script)
            server = ServerProcess("bubblewrap", folder, arguments=("--host", there.reached), within=within)
        server.start()
        stack.callback(server.end)
        made = Place(server, server.client(), there)
        stack.callback(lambda: made.client.close())  # noqa: PLW0108 - it may be another one then
        yield made


@pytest.fixture
def session(place: Place) -> Iterator[str]:
    made = place.session()
    yield made
    place.client.delete(f"/v1/sessions/{made}")


def test_a_public_name_is_reached_and_nothing_that_leads_inwards(place: Place, session: str) -> None:
    code = (
        f"{RAW}{FETCH}\nprint(repr(fetch('http://public.example/')))\nfor host in {INWARDS!r}: print(raw(host), host)"
    )
    first, *others = place.python(session, code)
    assert "The site public.example says hello" in first
    assert len(others) == len(INWARDS)
    assert [line for line in others if line.split()[0] not in ("403", "400")] == []
    assert place.town.burnt() == []
    assert (PUBLIC, 80) in {(address, port) for address, port, _ in place.town.guests()}


def test_a_name_that_changes_its_mind_is_reached_at_the_address_that_was_judged(place: Place, session: str) -> None:
    lines = place.python(session, f"{FETCH}\nfor _ in range(12): print(fetch('http://turning.example/')[:20])")
    assert {line.split()[0] for line in lines} == {"200", "403"}, lines
    assert all(line.startswith(("200 ", "403 private_address")) for line in lines)
    lines = place.python(
        session,
        f"{RAW.replace('GET http://{host}/', 'CONNECT {host}')}\nfor _ in range(12): print(raw('turning.example:80'))",
    )
    assert set(lines) == {"200", "403"}
    assert place.town.burnt() == []


@pytest.mark.parametrize(
    "to", ["http://127.0.0.1:8080/", "http://loop.example:8080/", "http://2130706433:8080/", "http://not.example/"]
)
def test_each_hop_of_a_redirect_is_judged(place: Place, session: str, to: str) -> None:
    url = f"http://public.example/to?{to}"
    (line,) = place.python(session, f"{FETCH}\nprint(fetch({url!r}))")
    refused = ("URLError",) if "127.0.0.1" in to else ("403", "502")  # the sandbox's own loopback needs no proxy
    assert line.split()[0] in refused, line
    if shutil.which("curl") and place.server.runtime == "bubblewrap":
        command = f"curl -sSL -o /dev/null -w '%{{http_code}}' '{url}' || true"  # it knows loopback in any notation
        said = place.call(session, "shell_execute", command=command).json()["structured"]
        assert said["stdout"] in ("403", "502") or "Failed to connect to 127.0.0.1" in said["stderr"], said
    assert place.town.burnt() == []


def test_web_pages_that_redirect_inwards_are_denied_with_the_place(place: Place) -> None:
    session = place.session("web")
    assert "says hello" in place.call(session, "web_fetch", url="http://public.example/to?http://other.example/").text
    for inwards in ("127.0.0.1:8080", "loop.example:8080"):
        answer = place.call(session, "web_fetch", url=f"http://public.example/to?http://{inwards}/")
        detail = answer.json()["detail"]
        assert (answer.status_code, detail["code"]) == (500, "policy_denied"), answer.text
        host, port = inwards.split(":")
        assert [(one["host"], one["port"]) for one in detail["denied"]] == [(host, int(port))]
    assert place.town.burnt() == []
    place.client.delete(f"/v1/sessions/{session}")


def test_the_browser_shows_public_pages_and_is_denied_the_rest(place: Place) -> None:
    if place.server.runtime == "docker" or not os.access(PROGRAM, os.X_OK):
        pytest.skip("with the Chromium of this machine, the Debian package chromium-headless-shell")
    session = place.session("browser")
    shown = place.call(session, "browser_open", url="http://public.example/")
    assert "The site public.example says hello" in shown.text, shown.text
    for inwards in (
        "http://loop.example:8080/",
        "http://public.example/to?http://inner.example:8080/",
        "http://mixed.example/",
    ):
        answer = place.call(session, "browser_open", url=inwards)
        detail = answer.json()["detail"]
        assert (answer.status_code, detail["code"]) == (500, "policy_denied"), answer.text
        assert "private_address" in [one["rule"] for one in detail["denied"]]
    change = {"allow": ["other.example:80"]}
    assert place.client.put(f"/v1/sessions/{session}/egress", json=change).status_code == 200
    assert "other.example says hello" in place.call(session, "browser_open", url="http://other.example/").text
    denied = place.call(session, "browser_open", url="http://public.example/").json()["detail"]["denied"]
    assert [(one["host"], one["rule"]) for one in denied] == [("public.example", "not_allowed")]
    assert place.town.burnt() == []
    place.client.delete(f"/v1/sessions/{session}")


def test_a_new_policy_holds_for_every_image_of_the_session_and_a_killed_server_keeps_it(place: Place) -> None:
    session = place.session("workspace", "web", allow=["other.example"])
    fetch = f"{FETCH}\nprint(fetch('http://{{host}}.example/')[:22])"

    numbers = itertools.count()

    def reached(host: str) -> list[bool]:
        (line,) = place.python(session, fetch.replace("{host}", host))
        page = place.call(
            session, "web_fetch", url=f"http://{host}.example/?{next(numbers)}"
        )  # one that it does not remember
        assert page.status_code == 200 or page.json()["detail"]["code"] == "policy_denied", page.text
        assert line.startswith(("200 ", "403 not_allowed"))
        return [line.startswith("200 "), page.status_code == 200]

    assert (reached("other"), reached("public")) == ([True, True], [False, False])
    put = place.client.put(f"/v1/sessions/{session}/egress", json={"allow": ["public.example"]})
    assert put.status_code == 200
    assert (reached("other"), reached("public")) == ([False, False], [True, True])
    place.server.kill()
    place.server.start()
    place.client.close()
    place.client = place.server.client()
    assert (reached("other"), reached("public")) == ([False, False], [True, True])
    assert place.town.burnt() == []
    place.client.delete(f"/v1/sessions/{session}")
