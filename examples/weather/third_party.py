"""The demo's third-party tool: an MCP server that others wrote, in an image that is built here and added by one command."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from toolserver.images.build import ASK_PYTHON
from toolserver.images.debian_base import cache_dir
from toolserver.images.definition import ImageBuildError
from toolserver.images.engine import ImageEngine
from toolserver.images.wheels import cached_wheels

FOLDER = Path(__file__).resolve().parent / "sqlite"
NAME, IMAGE, BASE = "sqlite", f"toolcrib-example/sqlite:{version('toolcrib')}", f"toolcrib/base:{version('toolcrib')}"
ADD = (
    *("tools", "add", IMAGE, "--name", NAME, "--workspace", "rw", "--allow-tool", "read_query"),
    *("--describe", "read_query=Run a SELECT query on the SQLite database weather.db in the workspace"),
)
MADE_FROM = "toolcrib-example.inputs"


def offered_in(state_dir: Path) -> bool:
    """Whether the tool stands in `state_dir` now; what is done for it is said."""
    try:
        image_id = built()
    except ImageBuildError as problem:
        say(f"Third-party tool: left out, since its image can't be built. {problem}")
        return False
    found = toolserver(state_dir, "tools", "show", NAME, "--json")
    if found.returncode == 0:
        entry = json.loads(found.stdout)
        if entry["state"] == "approved" and entry["digest"] == image_id:
            say(f"Third-party tool: {IMAGE}, added before")
            return True
        toolserver(state_dir, "tools", "remove", NAME)  # the image was built anew
    say("$ " + shlex.join(["toolserver", *ADD]))
    added = toolserver(state_dir, *ADD)
    say((added.stderr + added.stdout).strip())
    if added.returncode != 0:
        say("Third-party tool: left out, since it was not added.")
    return added.returncode == 0


def toolserver(state_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, on a state folder of the demo's own."""
    environment = {**os.environ, "TOOLSERVER_STATE_DIR": str(state_dir)}
    command = [sys.executable, "-m", "toolserver", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def built() -> str:
    """The image's id; it is built unless the engine has it as it would be made now. Raises ImageBuildError."""
    requirements = packages((FOLDER / "requirements.txt").read_text("utf-8"))
    with ImageEngine(os.environ.get("TOOLSERVER_RUNTIME__DOCKER_HOST")) as engine:
        base = (engine.image(BASE) or {}).get("Id", "")
        sources = [path.read_bytes() for path in sorted(FOLDER.iterdir())]
        inputs = hashlib.sha256(b"\0".join([base.encode(), *sources])).hexdigest()[:24]
        if engine.labels(IMAGE).get(MADE_FROM) != inputs:
            say(f"Third-party tool: building {IMAGE} with {requirements[0]}, this once")
            python, machine = engine.run(BASE, ASK_PYTHON).split()
            wheels = cached_wheels(requirements, python, machine, cache_dir() / "wheels", lambda _line: None)
            engine.build(context(wheels), IMAGE, {"BASE": BASE}, {MADE_FROM: inputs}, lambda _line: None)
        return str((engine.image(IMAGE) or {}).get("Id", ""))


def packages(text: str) -> Sequence[str]:
    return [name for line in text.splitlines() if (name := line.partition("#")[0].strip())]


def context(wheels: Path) -> io.BytesIO:
    """What the build gets: the folder beside this file, and the packages."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(FOLDER, arcname=".")
        tar.add(wheels, arcname="wheels")
    packed.seek(0)
    return packed


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
