"""Snapshots over HTTP with real sandboxes: what is put back is what was there, and every refusal leaves all as it was."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import ServerProcess
from toolserver.store import keys
from toolserver.store.connection import database_path
from toolserver.store.database import Database

MAX_MB = 40


@pytest.fixture(
    scope="module",
    params=[pytest.param("bubblewrap", marks=pytest.mark.bubblewrap), pytest.param("docker", marks=pytest.mark.docker)],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp(f"snapshots-{request.param}")
    process = ServerProcess(request.param, folder, {"TOOLSERVER_SNAPSHOT__MAX_MB": str(MAX_MB)}).start()
    yield process
    process.end()


class Tenant:
    """One tenant's client. Each test has its own, so that none meets another's quota."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.name = f"t{time.monotonic_ns()}"
        key = keys.new_text()
        database = Database(database_path(server.folder / "state"))
        database.open()
        database.run(lambda connection: keys.create(connection, key, self.name, self.name, "use"))
        database.close()
        self.client = server.client(key, timeout=120)

    def session(self, **body: Any) -> Session:
        answer = self.client.post("/v1/sessions", json={"images": ["workspace"], **body})
        assert answer.status_code == 201, answer.text
        return Session(self.client, answer.json()["id"])


class Session:
    def __init__(self, client: httpx.Client, session_id: str) -> None:
        self.client, self.id, self.path = client, session_id, f"/v1/sessions/{session_id}"

    def python(self, code: str) -> str:
        body = {"arguments": {"code": code}, "wait_s": 90, "deadline_s": 90}
        answer = self.client.post(f"{self.path}/tools/python_execute", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["structured"]["stdout"])

    def take(self) -> dict[str, Any]:
        answer = self.client.post(f"{self.path}/snapshots", json={})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def restore(self, snapshot_id: str) -> httpx.Response:
        return self.client.post(f"{self.path}/restore", json={"snapshot_id": snapshot_id})

    def tree(self) -> str:
        return self.python(TREE)


@pytest.fixture
def tenant(server: ServerProcess) -> Iterator[Tenant]:
    made = Tenant(server)
    yield made
    for session in made.client.get("/v1/sessions").json()["sessions"]:
        made.client.delete(f"/v1/sessions/{session['id']}")
    made.client.close()


ODD = r"""
import os
for path in (b'd/empty', b'repo/.git/objects', b'x' * 255 + b'/' + b'y' * 255):
    os.makedirs(path, exist_ok=True)
for name in (b'-rf', b'new\nline', b'back\\slash', b'\xff\xfe', '\u00fc'.encode(), b'repo/.git/HEAD', b'x' * 255 + b'/f'):
    with open(name, 'wb') as file:
        file.write(name * 3)
os.chmod('-rf', 0o751); os.chmod(b'\xff\xfe', 0); os.chmod('d/empty', 0o1770)
for name, target in (('abs', '/etc/passwd'), ('dangling', 'no where'), ('up', '../..'), ('dir', 'd')):
    os.symlink(target, name)
with open('big', 'wb') as file:
    file.write(os.urandom(2500000))
with open('sparse', 'wb') as file:
    file.truncate(900 << 20)
os.mkdir('shut'); open('shut/f', 'w').write('x'); os.chmod('shut', 0)
"""
TREE = r"""
import os, hashlib, stat
def _tree():
    for folder, folders, files, fd in os.fwalk(b'.'):
        folders[:] = sorted(name for name in folders if name != b'.toolcrib')
        for name in sorted(folders + files):
            info = os.lstat(name, dir_fd=fd)
            content = ''
            if stat.S_ISLNK(info.st_mode):
                content = os.readlink(name, dir_fd=fd)
            elif stat.S_ISREG(info.st_mode) and info.st_size < 1 << 27 and info.st_mode & 0o400:
                content = hashlib.sha256(open(os.open(name, os.O_RDONLY, dir_fd=fd), 'rb').read()).hexdigest()
            print(folder, name, oct(info.st_mode), info.st_size if stat.S_ISREG(info.st_mode) else '', content)
_tree()
"""
WRECK = r"""
import shutil
os.chmod('shut', 0o700)
for name in os.listdir('.'):
    if name != '.toolcrib':
        shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.remove(name)
os.mkdir('-rf'); open('-rf/in the way', 'w'); open('d', 'w'); os.mkfifo('fifo'); os.symlink('/tmp', 'repo')
os.makedirs('extra/in/side'); os.chmod('extra/in', 0); os.chmod('extra', 0)
os.mkdir('x' * 255); os.chmod('x' * 255, 0o500)
"""


def test_an_odd_tree_is_restored_and_forked_exactly(tenant: Tenant) -> None:
    session = tenant.session()
    session.python(ODD)
    before = session.tree()
    taken = session.take()
    assert (taken["files"], taken["left_out"]) == (10, [])
    assert session.tree() == before
    session.python(WRECK)
    done = session.restore(taken["snapshot_id"])
    assert done.status_code == 200, done.text
    assert (done.json()["exact"], done.json()["differs"]) == (True, [])
    assert session.tree() == before
    assert session.take()["snapshot_id"] == taken["snapshot_id"]
    assert tenant.session(from_snapshot=taken["snapshot_id"]).tree() == before
    assert session.python("os.chmod('shut', 0o700); print(open('shut/f').read())") == "x\n"


def test_only_what_changed_is_read(tenant: Tenant) -> None:
    session = tenant.session()
    session.python("for n in range(300):\n    open(f'f{n}', 'w').write(f'{n}' * 1000)")
    first = session.take()
    time.sleep(0.1)
    assert session.take()["read_bytes"] <= first["read_bytes"]  # what was just written is looked at once more
    session.python(
        "import os\nwas = os.stat('f7')\nopen('f7', 'w').write('z' * 1000)\nos.utime('f7', ns=(was.st_atime_ns, was.st_mtime_ns))"
    )
    second = session.take()
    assert (second["read_bytes"], second["new_bytes"]) == (1000, 1000)
    told = tenant.client.get(f"{session.path}/diff?from={first['snapshot_id']}&to={second['snapshot_id']}").json()
    assert [(entry["path"], entry["changes"]) for entry in told["changed"]] == [("f7", ["content"])]
    assert (told["added"], told["removed"], told["truncated"]) == ([], [], False)


def test_special_files_are_left_out_and_said(tenant: Tenant) -> None:
    session = tenant.session()
    session.python(
        "import os, socket\nos.mkfifo('fifo')\nsock = socket.socket(socket.AF_UNIX); sock.bind('sock')\nopen('f', 'w').write('x')"
    )
    taken = session.take()
    assert (taken["files"], taken["left_out_more"]) == (1, False)
    assert taken["left_out"] == [{"path": "fifo", "kind": "fifo"}, {"path": "sock", "kind": "socket"}]


def test_snapshots_outlive_their_session_and_stay_their_tenants(server: ServerProcess, tenant: Tenant) -> None:
    session = tenant.session()
    session.python("open('f', 'w').write('kept')")
    taken = session.take()["snapshot_id"]
    tenant.client.delete(session.path)
    assert tenant.client.get(f"{session.path}/snapshots").status_code == 410
    second = tenant.session(from_snapshot=taken)
    assert second.python("print(open('f').read())") == "kept\n"
    assert tenant.client.get(f"{second.path}/snapshots").json() == {"snapshots": []}
    other = Tenant(server)
    theirs = other.session()
    for answer in (
        theirs.restore(taken),
        other.client.get(f"{theirs.path}/diff?from={taken}&to={taken}"),
        other.client.post("/v1/sessions", json={"from_snapshot": taken}),
        other.client.delete(f"{theirs.path}/snapshots/{taken}"),
        second.restore("snap_" + "0" * 64),
        second.restore("../../etc"),
        tenant.client.delete(f"{second.path}/snapshots/{taken}"),  # of another session
    ):
        assert (answer.status_code, answer.json()["detail"]["code"]) == (404, "snapshot_not_found")
    other.client.delete(theirs.path)
    other.client.close()


def test_a_snapshot_that_is_deleted_is_gone_with_what_only_it_held(server: ServerProcess, tenant: Tenant) -> None:
    session = tenant.session()
    session.python("import os\nopen('f', 'wb').write(os.urandom(5 << 20))")
    first = session.take()["snapshot_id"]
    session.python("open('f', 'wb').write(b'small')")
    second = session.take()["snapshot_id"]
    listed = tenant.client.get(f"{session.path}/snapshots").json()["snapshots"]
    assert [entry["snapshot_id"] for entry in listed] == [first, second]
    size = stored(server)
    assert tenant.client.delete(f"{session.path}/snapshots/{first}").status_code == 204
    assert session.restore(first).status_code == 404
    until = time.monotonic() + 20
    while stored(server) > size - (4 << 20):
        assert time.monotonic() < until, "the sweep gives the room back"
        time.sleep(0.1)
    assert session.restore(second).json()["exact"]


def stored(server: ServerProcess) -> int:
    return sum(path.stat().st_size for path in (server.folder / "state/snapshots").iterdir())


def test_folders_and_links_that_do_not_fit_change_nothing(tenant: Tenant) -> None:
    session = tenant.session()
    session.python("import os\nfor n in range(1500): os.makedirs(f'd{n}/e'); os.symlink('t' * 3000, f'l{n}')")
    taken = session.take()["snapshot_id"]
    held = tenant.session(limits={"disk_mb": 4})
    held.python("import os\nos.mkdir('my')\nopen('my/file', 'w').write('mine')")
    before = held.tree()
    answer = held.restore(taken)
    if tenant.client.get(held.path).json()["isolation"]["disk"] == "enforced" or answer.status_code != 200:
        assert (answer.status_code, answer.json()["detail"]["effects"]) == (413, "none"), answer.text
        assert "Nothing was changed" in answer.json()["detail"]["message"]
        assert held.tree() == before
    assert held.python("print('on')") == "on\n"
    again = tenant.client.post("/v1/sessions", json={"images": ["workspace"], "from_snapshot": taken})
    assert again.status_code == 201, "where there is room"


def test_quotas_refuse_before_anything_changes(tenant: Tenant) -> None:
    session = tenant.session()
    session.python("import os\nopen('f', 'wb').write(os.urandom(25 << 20))")
    taken = session.take()["snapshot_id"]
    small = tenant.client.post(
        "/v1/sessions", json={"images": ["workspace"], "from_snapshot": taken, "limits": {"disk_mb": 8}}
    )
    assert (small.status_code, small.json()["detail"]["code"]) == (413, "too_large")
    held = tenant.session(limits={"disk_mb": 8})
    held.python("open('mine', 'w').write('mine')")
    before = held.tree()
    answer = held.restore(taken)
    assert (answer.status_code, answer.json()["detail"]["code"]) == (413, "too_large")
    assert held.tree() == before
    assert len(tenant.client.get("/v1/sessions").json()["sessions"]) == 2, "a session that can't be filled is not made"
    session.python("open('g', 'wb').write(os.urandom(25 << 20))")
    answer = tenant.client.post(f"{session.path}/snapshots", json={})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (413, "too_large"), "more than a snapshot may hold"
    session.python("os.remove('f')")
    answer = tenant.client.post(f"{session.path}/snapshots", json={})
    assert (answer.status_code, answer.json()["detail"]["code"]) == (429, "quota_exceeded"), "with the first too much"
    assert tenant.client.delete(f"{session.path}/snapshots/{taken}").status_code == 204
    until = time.monotonic() + 30
    while tenant.client.post(f"{session.path}/snapshots", json={}).status_code != 201:
        assert time.monotonic() < until
        time.sleep(0.3)


def test_a_restore_runs_alone(tenant: Tenant) -> None:
    session = tenant.session()
    session.python("open('f', 'w').write('x')")
    taken = session.take()["snapshot_id"]
    calling = threading.Thread(target=session.python, args=("import time; open('going', 'w'); time.sleep(4)",))
    calling.start()
    until = time.monotonic() + 20
    while tenant.client.get(f"{session.path}/files/going").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)
    answer = session.restore(taken)
    assert (answer.status_code, answer.json()["detail"]["code"]) == (429, "quota_exceeded")
    assert session.take()["files"] == 2, "a snapshot may be taken meanwhile"
    calling.join()
    assert session.restore(taken).status_code == 200
    assert tenant.client.get(f"{session.path}/files/going").status_code == 404


def test_a_damaged_snapshot_is_told_and_nothing_is_restored(server: ServerProcess, tenant: Tenant) -> None:
    session = tenant.session()
    session.python("import os\nopen('f', 'wb').write(os.urandom(1000))")
    taken = session.take()["snapshot_id"]
    session.python("open('f', 'w').write('now')")
    before = session.tree()
    damaged = 0
    for path in (server.folder / "state/snapshots").glob("*.db"):
        with sqlite3.connect(path, timeout=20) as raw:
            damaged += raw.execute("UPDATE blobs SET data = randomblob(1000) WHERE length(data) = 1000").rowcount
        raw.close()
    assert damaged == 1
    answer = session.restore(taken)
    assert (answer.status_code, answer.json()["detail"]["code"], answer.json()["detail"]["effects"]) == (
        500,
        "internal",
        "none",
    )
    assert session.tree() == before
    assert tenant.client.post("/v1/sessions", json={"images": ["workspace"], "from_snapshot": taken}).status_code == 500


@pytest.mark.parametrize("runtime", [pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)])
def test_a_server_that_is_killed_keeps_every_snapshot_that_it_told_of(tmp_path: Path, runtime: str) -> None:
    """Killed while one is made, restored, deleted and swept: those that were answered with 201 are whole afterwards."""
    server = ServerProcess(runtime, tmp_path).start()
    told: dict[str, str] = {}
    try:
        for number in range(2):
            with server.client(timeout=60) as client:
                answer = client.post("/v1/sessions", json={"images": ["workspace"]})
                assert answer.status_code == 201, answer.text
                session = Session(client, answer.json()["id"])
                session.python(
                    f"import os\nfor n in range(20):\n    open(f'f{{n}}', 'wb').write(os.urandom(100_000) + b'{number}')"
                )
                told[session.take()["snapshot_id"]] = session.tree()
                stop = threading.Event()
                work = threading.Thread(target=_busy, args=(server.url, server.key, session.path, list(told), stop))
                work.start()
                time.sleep(0.2 + 0.5 * number)
            server.kill()
            stop.set()
            work.join()
            server.start()
        with server.client(timeout=60) as client:
            for snapshot_id, tree in told.items():
                answer = client.post("/v1/sessions", json={"images": ["workspace"], "from_snapshot": snapshot_id})
                assert answer.status_code == 201, answer.text
                assert Session(client, answer.json()["id"]).tree() == tree
                client.delete(f"/v1/sessions/{answer.json()['id']}")
    finally:
        server.end()


def _busy(url: str, key: str, path: str, told: list[str], stop: threading.Event) -> None:
    head = {"Authorization": f"Bearer {key}"}
    code = "import os\nfor n in range(0, 20, 4):\n    open(f'f{n}', 'wb').write(os.urandom(300_000))"
    try:
        with httpx.Client(base_url=url, headers=head, timeout=30, trust_env=False) as client:
            while not stop.is_set():
                client.post(f"{path}/tools/python_execute", json={"arguments": {"code": code}})
                made = client.post(f"{path}/snapshots", json={})
                client.post(f"{path}/restore", json={"snapshot_id": told[0]})
                if made.status_code == 201:
                    client.delete(f"{path}/snapshots/{made.json()['snapshot_id']}")
    except httpx.HTTPError:
        return  # the server was killed, as was meant
