"""Tool images of others, from the command line to a call: added, called, changed, approved and removed beside a running server."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.foreign_images import ForeignImages, foreign_images
from tests.server_process import ServerProcess

pytestmark = pytest.mark.docker
SECRET = "Zq7!the-operators-token/+9"
FILES = {"server.py": (Path(__file__).with_name("pliable_server.py")).read_text()}
LINES = ("FROM base", "COPY server.py /opt/server.py")
COMMAND = '["python3", "-I", "/opt/server.py"'


@pytest.fixture(scope="module")
def images() -> Iterator[ForeignImages]:
    with foreign_images() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    config = folder / "settings.toml"
    config.write_text(
        '[tools.settled]\nimage = "toolcrib-test/settled"\nallow = ["say"]\nlimits = { memory_mb = 96 }\n'
    )
    settings = {"TOOLSERVER_POOL__ENABLED": "false", "TOOLCRIB_TEST_TOKEN": SECRET, "TOOLSERVER_CONFIG": str(config)}
    process = ServerProcess("docker", folder, settings).start()
    yield process
    process.end()


def toolserver(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolserver", *arguments]
    if arguments[:2] != ("tools", "new"):
        command += ["--state-dir", str(server.folder / "state")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **server.settings}
    )


def told(server: ServerProcess, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = toolserver(server, *arguments, "--json")
    assert done.returncode == code, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def offered(client: httpx.Client) -> dict[str, str]:
    return {tool["name"]: tool["image"] for tool in client.get("/v1/tools").json()["tools"]}


def until(condition: Any, limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def session_of(client: httpx.Client, *names: str) -> str:
    answer = client.post("/v1/sessions", json={"images": list(names)})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def call(client: httpx.Client, session: str, tool: str, text: str = "x") -> httpx.Response:
    return client.post(f"/v1/sessions/{session}/tools/{tool}", json={"arguments": {"text": text}})


def withheld(client: httpx.Client) -> dict[str, str]:
    return {one["image"]: one["reason"] for one in client.get("/v1/tools").json().get("withheld", [])}


def test_from_nothing_to_a_call(server: ServerProcess, images: ForeignImages, tmp_path: Path) -> None:
    made = told(server, "tools", "new", "wordy", "--dir", str(tmp_path / "wordy"))
    folder = Path(made["folder"])
    tests = subprocess.run(
        [sys.executable, "-m", "unittest", "test_server.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert tests.returncode == 0, tests.stderr
    files = {file: (folder / file).read_text() for file in made["files"]}
    image = images.build(files.pop("Dockerfile"), files=files, tag="toolcrib-test/wordy")
    report = told(server, "tools", "check", "toolcrib-test/wordy")
    assert (report["digest"], report["fail"], report["warn"]) == (image, 0, 0), report
    assert report["pass"] == len(report["checks"]) > 12

    added = told(server, "tools", "add", "toolcrib-test/wordy")
    assert (added["image"], added["state"], added["tools"]) == ("wordy", "approved", ["count_words"])
    with server.client() as client:
        until(lambda: offered(client).get("count_words") == "wordy")
        session = session_of(client, "wordy")
        assert call(client, session, "count_words", "one two three").json()["content"][0]["text"] == "3"
        assert (
            client.get("/v1/tools/search", params={"q": "how many words"}).json()["tools"][0]["name"] == "count_words"
        )
        assert server.containers(session) or server.docker("ps", "-q", "--filter", "label=toolcrib.image=wordy")

        assert told(server, "tools", "remove", "wordy")["removed"] is True
        until(lambda: "count_words" not in offered(client))
        gone = call(client, session, "count_words")
        assert gone.status_code == 404
        until(lambda: not server.docker("ps", "-q", "--filter", "label=toolcrib.image=wordy"))
    assert "there is no added image 'wordy'" in toolserver(server, "tools", "show", "wordy").stderr


def test_a_list_that_changes_is_withheld_until_it_is_approved(server: ServerProcess, images: ForeignImages) -> None:
    images.build(*LINES, f"ENTRYPOINT {COMMAND}]", files=FILES, tag="toolcrib-test/pliable")
    told(server, "tools", "add", "toolcrib-test/pliable")
    with server.client() as client:
        until(lambda: "grow" in offered(client))
        session = session_of(client, "pliable")
        assert call(client, session, "say", "hello").json()["content"][0]["text"] == "say: hello"
        call(client, session, "grow")
        until(lambda: "pliable" in withheld(client))
        assert "added grown" in withheld(client)["pliable"]
        assert "say" not in offered(client)
        refused = call(client, session, "say")
        assert refused.status_code == 404
        assert "toolserver tools approve pliable" in refused.json()["detail"]["message"]
        until(lambda: told(server, "tools", "show", "pliable")["state"] == "changed")
        doctor = toolserver(server, "doctor", "--runtime", "docker")
        assert "added grown" in doctor.stdout + doctor.stderr

        assert told(server, "tools", "approve", "pliable", "--yes")["approved"] is True
        until(lambda: "say" in offered(client))
        assert call(client, session, "say", "again").json()["content"][0]["text"] == "say: again"

    before = told(server, "tools", "show", "pliable")["digest"]
    images.build(*LINES, f'ENTRYPOINT {COMMAND}, "later"]', files=FILES, tag="toolcrib-test/pliable")
    shown = told(server, "tools", "show", "pliable")
    assert (shown["state"], shown["digest"]) == ("approved", before)
    assert "another image now" in shown["notice"]
    unasked = toolserver(server, "tools", "approve", "pliable")
    assert (unasked.returncode, "+tool later" in unasked.stdout) == (1, True), unasked.stdout
    assert told(server, "tools", "show", "pliable")["digest"] == before
    with server.client() as client:
        assert "later" not in offered(client)
        approved = told(server, "tools", "approve", "pliable", "--yes")
        assert approved["tools"] == {"added": ["later"], "removed": [], "changed": []}
        until(lambda: "later" in offered(client))
        assert call(client, session_of(client, "pliable"), "later", "on").json()["content"][0]["text"] == "later: on"
    told(server, "tools", "remove", "pliable")


def test_a_list_that_is_another_at_each_start_is_never_used(server: ServerProcess, images: ForeignImages) -> None:
    images.build(*LINES, f"ENTRYPOINT {COMMAND}]", files=FILES, tag="toolcrib-test/whims")
    report = told(server, "tools", "check", "toolcrib-test/whims", "--env", "WHIMS=1", code=1)
    assert [one["name"] for one in report["checks"] if one["state"] == "fail"] == ["same list each time"]
    told(server, "tools", "add", "toolcrib-test/whims", "--env", "WHIMS=1", "--rename", "say=whimsical")
    with server.client() as client:
        until(lambda: "whimsical" in offered(client))
        answer = call(client, session_of(client, "whims"), "whimsical")
        assert answer.status_code == 503
        assert "not what was approved" in answer.json()["detail"]["message"]
        assert "whims" in withheld(client)
    told(server, "tools", "remove", "whims")


def test_a_secret_is_used_and_never_seen(server: ServerProcess, images: ForeignImages) -> None:
    image = images.build(*LINES, f"ENTRYPOINT {COMMAND}]", files=FILES, tag="toolcrib-test/keeper")
    added = told(server, "tools", "add", image, "--name", "keeper", "--secret", "TOKEN=env:TOOLCRIB_TEST_TOKEN")
    assert added["entry"]["secrets"] == {"TOKEN": "env:TOOLCRIB_TEST_TOKEN"}
    forms = (SECRET, json.dumps(SECRET)[1:-1], base64.b64encode(SECRET.encode()).decode().rstrip("="))
    with server.client() as client:
        until(lambda: "leak" in offered(client))
        session = session_of(client, "keeper")
        good, bad = call(client, session, "leak"), call(client, session, "leak", "as an error")
        assert (good.status_code, bad.status_code) == (200, 500)
        for answer in (good, bad):
            assert "token […]" in answer.text, answer.text
            assert not [form for form in forms if form in answer.text]
            assert base64.b64encode(SECRET.encode()).decode()[4:24] not in answer.text
        assert good.json()["structured"]["deep"] == [{"[…]": "[…]"}]
        container = server.docker("ps", "-q", "--filter", "label=toolcrib.image=keeper").split()
        inspected = server.docker("inspect", *container)
    assert container
    small = [path for path in server.folder.rglob("*") if path.is_file() and path.stat().st_size < 16 << 20]
    kept = [path.read_bytes() for path in small]  # others are disks of workspaces
    assert not [form for form in forms if form in inspected or any(form.encode() in content for content in kept)]
    told(server, "tools", "remove", "keeper")

    missing = toolserver(server, "tools", "add", image, "--secret", "TOKEN=env:TOOLCRIB_TEST_NO_SUCH")
    assert missing.returncode == 2
    assert "TOOLCRIB_TEST_NO_SUCH" in missing.stderr
    itself = toolserver(server, "tools", "add", image, "--secret", f"TOKEN={SECRET}")
    assert itself.returncode == 2
    assert SECRET not in itself.stderr


def test_names_that_collide_have_their_image_before_them(server: ServerProcess, images: ForeignImages) -> None:
    image = images.build(*LINES, f'ENTRYPOINT {COMMAND}, "python_execute", "déjà vu"]', files=FILES)
    first = told(server, "tools", "add", image, "--name", "one")
    second = told(server, "tools", "add", image, "--name", "two", "--allow-tool", "say", "--allow-tool", "grow")
    assert first["tools"] == ["d_j_vu", "grow", "leak", "one.python_execute", "say"]
    assert second["tools"] == ["two.grow", "two.say"]
    again = toolserver(server, "tools", "add", image, "--name", "one")
    assert (again.returncode, "there is an image one already" in again.stderr) == (2, True)
    with server.client() as client:
        until(lambda: offered(client).get("two.say") == "two")
        session = session_of(client, "one", "two")
        assert call(client, session, "two.say", "hi").json()["content"][0]["text"] == "say: hi"
        assert call(client, session, "d_j_vu", "hi").json()["content"][0]["text"] == "déjà vu: hi"
        assert offered(client)["python_execute"] == "workspace"
        told(server, "tools", "remove", "one")
        until(lambda: "d_j_vu" not in offered(client))
        assert offered(client)["two.say"] == "two"  # a name that was given stays
    told(server, "tools", "remove", "two")


def test_an_image_in_the_settings_is_offered_once_approved(server: ServerProcess, images: ForeignImages) -> None:
    images.build(*LINES, f"ENTRYPOINT {COMMAND}]", files=FILES, tag="toolcrib-test/settled")
    with server.client() as client:
        assert "never approved" in withheld(client)["settled"]
        assert told(server, "tools", "show", "settled")["state"] == "new"
        told(server, "tools", "approve", "settled", "--yes")
        until(lambda: [name for name, image in offered(client).items() if image == "settled"] == ["say"])
        session = session_of(client, "settled")
        assert call(client, session, "say").status_code == 200
        container = server.docker("ps", "-q", "--filter", "label=toolcrib.image=settled").split()
        assert json.loads(server.docker("inspect", *container))[0]["HostConfig"]["Memory"] == 96 << 20
    refused = toolserver(server, "tools", "remove", "settled")
    assert (refused.returncode, "[tools.settled]" in refused.stderr) == (2, True)
    server.docker("rmi", "-f", "toolcrib-test/settled")
    shown = told(server, "tools", "show", "settled")
    assert shown["state"] in ("approved", "unusable")  # the engine may keep it below another name


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("toolcrib-test/no-such-image",), 5, "there is no image toolcrib-test/no-such-image"),
        (("x; rm -rf /",), 2, "is no name of an image"),
        ((), 2, "name an image"),
    ],
)
def test_what_can_not_be_added_is_said(server: ServerProcess, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = toolserver(server, "tools", "add", *arguments)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


@pytest.mark.parametrize(
    ("entrypoint", "said"),
    [
        ('["sleep", "600"]', "was not ready within 2 s"),
        ('["sh", "-c", "echo no such thing as a key >&2; exit 3"]', "no such thing as a key"),
        ('["/no/such/program"]', "/no/such/program"),
    ],
    ids=["silent", "exits", "no program"],
)
def test_an_image_that_is_no_server_is_refused_in_time(
    server: ServerProcess, images: ForeignImages, entrypoint: str, said: str
) -> None:
    image = images.build("FROM base", f"ENTRYPOINT {entrypoint}")
    server.settings["TOOLSERVER_RUNTIME__START_TIMEOUT_S"] = "2" if "sleep" in entrypoint else "20"
    done = toolserver(server, "tools", "add", image, "--name", "mute")
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert not server.docker("ps", "-aq", "--filter", "label=toolcrib.image=mute")
