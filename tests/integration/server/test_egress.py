"""Egress with real sandboxes: ordinary clients in a sandbox reach what the session may, through the proxy, and nothing else."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import ServerProcess
from toolserver.app import server_id

WHEEL = "tiny-1.0-py3-none-any.whl"


def _wheel() -> bytes:
    """A package for pip, as small as one can be."""
    made = io.BytesIO()
    about = "tiny-1.0.dist-info"
    with zipfile.ZipFile(made, "w") as whole:
        whole.writestr("tiny.py", "NAME = 'tiny'\n")
        whole.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        whole.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        whole.writestr(f"{about}/RECORD", f"tiny.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    return made.getvalue()


class _Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/slow":
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            try:
                for _ in range(300):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.1)
            except OSError:
                return
        pages = {
            "/much": b"m" * (3 << 20),
            f"/{WHEEL}": _wheel(),
            "/simple/tiny/": f'<a href="/{WHEEL}">{WHEEL}</a>'.encode(),
        }
        body = pages.get(self.path, b"the site says hello")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name it has in the base class
        """Said to nobody."""


def _gateway() -> str:
    command = ["docker", "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return said or "172.17.0.1"


@dataclass
class Place:
    server: ServerProcess
    site: str  # host:port that the operator's allow_private names
    other: str  # of the same machine, which it does not
    client: httpx.Client

    def session(self, egress: dict[str, Any] | None = None, **body: object) -> str:
        asked = {"ttl_s": 600, "images": ["workspace"], "egress": egress or {"mode": "none"}, **body}
        answer = self.client.post("/v1/sessions", json=asked)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def call(self, session: str, tool: str, **arguments: object) -> httpx.Response:
        body = {"arguments": arguments, "wait_s": 90, "deadline_s": 90}
        return self.client.post(f"/v1/sessions/{session}/tools/{tool}", json=body)

    def python(self, session: str, code: str) -> str:
        answer = self.call(session, "python_execute", code=code)
        assert answer.status_code == 200, answer.text
        return "".join(block.get("text", "") for block in answer.json()["content"])

    def allow(self, *rules: str) -> dict[str, Any]:
        return {"mode": "allow", "allow": list(rules or (self.site,))}


PARAMS = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]


@pytest.fixture(scope="module", params=PARAMS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    host = _gateway() if request.param == "docker" else "127.0.0.2"  # not what NO_PROXY names
    sites = [ThreadingHTTPServer((host, 0), _Site) for _ in range(2)]
    for site in sites:
        threading.Thread(target=site.serve_forever, daemon=True).start()
    allowed, other = (f"{host}:{site.server_address[1]}" for site in sites)
    settings = {
        "TOOLSERVER_EGRESS__ALLOW_PRIVATE": json.dumps([allowed]),
        "TOOLSERVER_EGRESS__MAX_CONNECTION_MB": "2",
        "TOOLSERVER_EGRESS__MAX_CONNECTION_S": "4",
    }
    server = ServerProcess(request.param, tmp_path_factory.mktemp(f"egress-{request.param}"), settings).start()
    made = Place(server, allowed, other, server.client())
    yield made
    made.client.close()
    server.end()
    assert not _proxies(server)
    for site in sites:
        site.shutdown()
        site.server_close()


CLIENTS = {
    "urllib": "import urllib.request; print(urllib.request.urlopen('http://{site}/', timeout=20).read().decode())",
    "http.client": (
        "import http.client; c = http.client.HTTPConnection('127.0.0.1', 3128, timeout=20); c.set_tunnel('{host}', {port}); "
        "c.request('GET', '/'); print(c.getresponse().read().decode())"
    ),
}


def code(place: Place, text: str) -> str:
    host, port = place.site.split(":")
    return text.format(site=place.site, other=place.other, host=host, port=port)


@pytest.mark.parametrize("name", CLIENTS)
def test_python_reaches_what_is_allowed(place: Place, name: str) -> None:
    session = place.session(place.allow())
    assert "the site says hello" in place.python(session, code(place, CLIENTS[name]))
    place.client.delete(f"/v1/sessions/{session}")


def test_a_shell_has_the_variables_that_programs_go_by(place: Place) -> None:
    session = place.session(place.allow())
    answer = place.call(session, "shell_execute", command="env | grep -i _proxy | sort")
    assert answer.status_code == 200, answer.text
    said = answer.json()["content"][0]["text"]
    assert "http_proxy=http://127.0.0.1:3128" in said
    assert "HTTPS_PROXY=http://127.0.0.1:3128" in said
    assert "NO_PROXY=localhost,127.0.0.1,::1" in said
    assert "ALL_PROXY" not in said
    place.client.delete(f"/v1/sessions/{session}")


def test_what_is_not_allowed_is_denied_told_and_journalled(place: Place) -> None:
    session = place.session(place.allow(place.site, "example.org"))
    text = "import urllib.request; urllib.request.urlopen('http://{other}/', timeout=20)"
    answer = place.call(session, "python_execute", code=code(place, text))
    detail = answer.json()["detail"]
    host, port = place.other.split(":")
    assert (answer.status_code, detail["code"], detail["fault"]) == (500, "policy_denied", "policy"), answer.text
    assert detail["denied"] == [{"host": host, "port": int(port), "rule": "not_allowed"}]
    assert "HTTPError" in answer.text
    journal = (place.server.folder / "state" / "journal").glob("*.jsonl")
    assert any(
        '"egress_denied"' in line and session in line for file in journal for line in file.read_text().splitlines()
    )
    place.client.delete(f"/v1/sessions/{session}")


def test_there_is_no_other_way_out(place: Place) -> None:
    session, neighbour = place.session(place.allow()), place.session(place.allow())
    probe = """
import os, socket
def tried(what):
    try:
        return what()
    except OSError as problem:
        return type(problem).__name__
host, port = '{host}', {port}
def raw():
    socket.create_connection((host, port), 5)
    return 'reached'
def resolve():
    return socket.getaddrinfo('example.org', 443)
print(tried(raw), tried(resolve), len(open('/proc/net/dev').readlines()) - 2)
try:
    names = os.listdir('/.toolcrib/egress')
except OSError as problem:
    names = type(problem).__name__
print(names)
def write():
    open('/.toolcrib/egress/mine', 'w')
print(tried(write), tried(lambda: os.listdir('/egress')))
def bind():
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); s.bind(('127.0.0.1', 3128))
print(tried(bind))
"""
    lines = place.python(session, code(place, probe.replace("{host}", "{host}"))).splitlines()
    assert lines[0].split()[0] in ("OSError", "ConnectionRefusedError", "TimeoutError")
    assert lines[0].split()[1:] == ["gaierror", "1"]
    assert lines[1] == "PermissionError"
    assert set(lines[2].split()) <= {"OSError", "PermissionError", "FileNotFoundError"}
    assert lines[3] == "OSError"
    for one in (session, neighbour):
        place.client.delete(f"/v1/sessions/{one}")


def test_the_servers_own_port_is_not_reached(place: Place) -> None:
    session = place.session({"mode": "open"})
    port = place.server.url.rsplit(":", 1)[1]
    text = f"""
import urllib.request, urllib.error
for host in ('127.0.0.1', 'localhost', '[::1]', '0.0.0.0', '169.254.169.254', '172.17.0.1', '2130706433'):
    request = urllib.request.Request(f'http://{{host}}:{port}/healthz')
    request.set_proxy('127.0.0.1:3128', 'http')
    try:
        print(urllib.request.urlopen(request, timeout=20).status)
    except urllib.error.HTTPError as refused:
        print(refused.code, refused.headers['X-Toolcrib-Denied'])
"""
    said = place.python(session, text).split("\n")
    assert {line.split()[0] for line in said if line} == {"403"}, said
    place.client.delete(f"/v1/sessions/{session}")


FETCH = """
import urllib.request, urllib.error
try:
    print(urllib.request.urlopen('http://{site}/', timeout=20).read().decode())
except urllib.error.HTTPError as refused:
    print(refused.code, refused.headers['X-Toolcrib-Denied'])
except OSError as problem:
    print(type(getattr(problem, 'reason', problem)).__name__)
"""


def test_the_policy_is_changed_in_the_middle_of_a_session(place: Place) -> None:
    session = place.session()
    fetch = code(place, FETCH)
    place.python(session, "kept = 41")
    assert "hello" not in place.python(session, fetch)
    change = f"/v1/sessions/{session}/egress"
    assert place.client.put(change, json=place.allow()).status_code == 200
    assert "hello" in place.python(session, fetch)
    slow = code(
        place,
        "import urllib.request; r = urllib.request.urlopen('http://{site}/slow', timeout=20); print(len(r.read(1)))",
    )
    assert place.python(session, slow).strip() == "1"
    assert place.client.put(change, json={"allow": ["example.org:443"]}).status_code == 200
    rest = "import http.client\ntry:\n    print('read', len(r.read()))\nexcept http.client.IncompleteRead as cut:\n    print('cut')"
    assert place.python(session, rest).strip() == "cut"
    assert "not_allowed" in place.python(session, fetch)
    assert place.client.put(change, json={"mode": "none"}).status_code == 200
    told = place.python(session, "import os; print(sorted(n for n in os.environ if 'PROXY' in n.upper()), kept + 1)")
    assert told.strip() == "[] 42"
    place.client.delete(f"/v1/sessions/{session}")


def test_bytes_and_time_are_bounded(place: Place) -> None:
    session = place.session(place.allow())
    bounded = """
import urllib.request, time
for path in ('much', 'slow'):
    began = time.monotonic()
    try:
        urllib.request.urlopen('http://{site}/' + path, timeout=30).read()
        print('whole')
    except Exception as cut:
        print(type(cut).__name__, time.monotonic() - began < 15)
"""
    assert "whole" not in place.python(session, code(place, bounded))
    place.client.delete(f"/v1/sessions/{session}")


def test_two_sessions_have_policies_of_their_own(place: Place) -> None:
    may, may_not = place.session(place.allow()), place.session(place.allow("example.org"))
    assert "hello" in place.python(may, code(place, FETCH))
    assert "403 not_allowed" in place.python(may_not, code(place, FETCH))
    for one in (may, may_not):
        place.client.delete(f"/v1/sessions/{one}")


def _proxies(server: ServerProcess) -> list[int]:
    """Processes of this machine that are the egress proxy of this server."""
    if server.runtime == "docker":
        labels = (f"label=toolcrib.server={server_id(server.folder / 'state')}", "label=toolcrib.role=egress-proxy")
        names = server.docker("ps", "-q", *(part for label in labels for part in ("--filter", label))).split()
        return [int(server.docker("inspect", "-f", "{{.State.Pid}}", name)) for name in names]
    found = []
    state = str((server.folder / "state").resolve())
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            if "egress/proxy.py" in line and state in line:
                found.append(int(entry.name))
    return found


def _until(true: Callable[[], object], within_s: float = 40) -> None:
    until = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_killed_proxy_fails_closed_and_comes_back(place: Place) -> None:
    session = place.session(place.allow())
    fetch = code(place, FETCH)
    assert "hello" in place.python(session, fetch)
    pids = _proxies(place.server)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: "hello" in place.python(session, fetch))
    place.client.delete(f"/v1/sessions/{session}")


def test_a_killed_server_goes_on_with_the_same_doors(place: Place) -> None:
    session = place.session(place.allow())
    fetch = code(place, FETCH)
    place.python(session, "kept = 41")
    place.client.put(f"/v1/sessions/{session}/egress", json=place.allow(place.site, "example.org"))
    assert "hello" in place.python(session, fetch)
    place.server.kill()
    _until(lambda: not _proxies(place.server))
    place.server.start()
    place.client.close()
    place.client = place.server.client()
    assert "hello" in place.python(session, f"{fetch}\nprint(kept)")
    egress = place.client.get(f"/v1/sessions/{session}").json()["egress"]
    assert sorted(egress["allow"]) == sorted([place.site, "example.org:80", "example.org:443"])
    place.client.delete(f"/v1/sessions/{session}")
    place.server.wait_no_leftovers(session)


@pytest.mark.parametrize("program", ["curl", "pip"])
def test_other_programs_go_through_it(place: Place, program: str) -> None:
    with_it = shutil.which("curl") if place.server.runtime == "bubblewrap" else None  # it has the host's programs
    if program == "curl" and with_it is None:
        pytest.skip("the sandbox has no curl")
    session = place.session(place.allow())
    if program == "curl":
        assert "hello" in place.call(session, "shell_execute", command=f"curl -sS http://{place.site}/").text
    else:
        host = place.site.split(":")[0]
        install = (
            f"python3 -m pip install --index-url http://{place.site}/simple --trusted-host {host} --target lib tiny"
        )
        answer = place.call(session, "shell_execute", command=install)
        assert answer.status_code == 200, answer.text
        assert (
            place.python(session, "import sys; sys.path.insert(0, '/workspace/lib'); import tiny; tiny.NAME").strip()
            == "'tiny'"
        )
    place.client.delete(f"/v1/sessions/{session}")
