"""The rivals one after the other, each in a virtual environment of its own, in images on the base of ours.

What does not install or run here is said in a line, with the reason, and left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toolserver.images.definition import BASE_REFERENCE, ImageBuildError
from toolserver.images.engine import ImageEngine
from toolserver.images.wheels import cached_wheels

Say = Callable[[str], None]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "toolcrib" / "rivals"
LIMIT_S = 900
DOCKERFILE = """
ARG BASE
FROM ${BASE}
USER root
COPY wheels/ /wheels/
RUN python3 -I $(echo /wheels/pip-*.whl)/pip install --no-index --find-links /wheels --break-system-packages \\
        --root-user-action=ignore --no-cache-dir --disable-pip-version-check -r /wheels/wanted.txt \\
    && ln -sf "$(command -v python3)" /usr/local/bin/python \\
    && mkdir -p /sandbox && python3 -m venv --without-pip --system-site-packages /sandbox/.sandbox-venv \\
    && printf '#!/bin/sh\\nexit 0\\n' > /sandbox/.sandbox-venv/bin/pip && chmod +x /sandbox/.sandbox-venv/bin/pip
CMD ["python3"]
"""


class Left(Exception):  # noqa: N818 - reads as what becomes of the rival
    """A rival that can't run here, and why."""


@dataclass(frozen=True)
class Entry:
    """`packages`: what it is installed from; `inside`: what its image has; `needs`: docker plugins. Neither: no rival but us."""

    packages: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    needs_compose: bool = False


_JUPYTER = ("jupyter_kernel_gateway", "ipykernel")
ROSTER = {
    "kernel_gateway": Entry(("docker", "requests", "websocket-client"), _JUPYTER),
    "swe_rex": Entry(("swe-rex", "aiohttp", "docker"), ("swe-rex",)),
    "swe_rex_repl": Entry(("swe-rex", "aiohttp", "docker"), ("swe-rex",)),
    "llm_sandbox_session": Entry(("llm-sandbox[docker]",), ("pip",)),
    "llm_sandbox_pool": Entry(("llm-sandbox[docker]",), ("pip",)),
    "autogen_docker": Entry(("autogen-ext[docker]",), ("pip",)),
    "smolagents_docker": Entry(("smolagents[docker]",), _JUPYTER),
    "openai_agents": Entry(("openai-agents[docker]", "docker"), ("pip",)),
    "inspect_docker": Entry(("inspect-ai", "openai", "docker"), ("pip",), needs_compose=True),
}
US = "toolcrib_http"
HERE = Path(__file__).resolve().parent


def race(names: Sequence[str], *, quick: bool, say: Say) -> dict[str, Any]:
    """Figures by rival, ours first. `{"left_out": reason}` for those that can't run here."""
    say(
        f"\n{'':22} {'cold ms':>9} {'warm ms':>9} {'calls/s':>9} {'created/s':>10} {'idle MiB':>9}   8 sessions for calls/s"
    )
    found: dict[str, Any] = {}
    for name in (US, *names):
        try:
            found[name] = _run(name, quick=quick)
            say(_line(name, found[name]))
        except Left as why:
            found[name] = {"left_out": str(why)}
            say(f"{name:22} left out: {why}")
    rates = {name: figures["calls_per_s"] for name, figures in found.items() if "calls_per_s" in figures}
    ours = rates.pop(US, None)
    if ours is not None and rates:
        best = max(rates, key=lambda name: rates[name])
        found["against_best"] = {"rival": best, "times": ours / rates[best]}
        say(f"calls/s: {ours / rates[best]:.1f} times the best rival, {best} (goal 3)")
    return found


def _line(name: str, figures: dict[str, Any]) -> str:
    values = [figures[key] for key in ("cold_ms", "warm_ms", "calls_per_s", "created_per_s", "idle_mib")]
    shown = ["-" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    return f"{name:22} {shown[0]:>9} {shown[1]:>9} {shown[2]:>9} {shown[3]:>10} {shown[4]:>9}"


def _run(name: str, *, quick: bool) -> dict[str, Any]:
    if name == US:
        python, image = Path(sys.executable), ""
    else:
        entry = ROSTER[name]
        if (
            entry.needs_compose
            and subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode
        ):
            raise Left("it needs the docker compose plugin")
        python, image = _environment(entry.packages), _image(entry.inside)
    command = [str(python), str(HERE / "drive.py"), name, image, "quick" if quick else "whole"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
    except subprocess.TimeoutExpired as late:
        raise Left(f"it did not end within {LIMIT_S} s") from late
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise Left(f"it failed: {said[-1][:200] if said else 'without a word'}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _environment(packages: tuple[str, ...]) -> Path:
    """Its Python, made once."""
    key = hashlib.sha256(repr((packages, sys.version)).encode()).hexdigest()[:16]
    folder = CACHE / f"venv-{key}"
    python = folder / "bin" / "python"
    if (folder / "whole").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise Left(f"{', '.join(packages)} did not install: {done.stderr.strip().splitlines()[-1][:200]}")
    (folder / "whole").touch()
    return python


def _image(packages: tuple[str, ...]) -> str:
    """Our base with these packages, built once for each version of the base."""
    base = f"{BASE_REFERENCE}:{version('toolcrib')}"
    try:
        with ImageEngine(None) as engine:
            found = engine.image(base)
            if found is None:
                raise Left(f"there is no image {base}: toolserver images build")
            key = hashlib.sha256(repr((found["Id"], packages, DOCKERFILE)).encode()).hexdigest()[:16]
            tagged = f"toolcrib/bench-rival:{key}"
            if engine.image(tagged) is None:
                python = engine.run(base, "import platform; print('.'.join(platform.python_version_tuple()[:2]))")
                wheels = cached_wheels(packages, python, platform.machine(), CACHE / "wheels", lambda _line: None)
                engine.build(_context(wheels, packages), tagged, {"BASE": base}, {}, lambda _line: None)
    except ImageBuildError as problem:
        raise Left(str(problem).splitlines()[0][:200]) from problem
    return tagged


def _context(wheels: Path, packages: tuple[str, ...]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for wheel in wheels.iterdir():
            tar.add(wheel, f"wheels/{wheel.name}")
        for name, text in (("Dockerfile", DOCKERFILE), ("wheels/wanted.txt", "\n".join(packages) + "\n")):
            data = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    packed.seek(0)
    return packed
