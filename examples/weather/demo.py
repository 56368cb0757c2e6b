"""The demo: a real goal on a real data file, from plan to report, in real sandboxes.

    python examples/weather/demo.py [--runtime docker|bubblewrap] [options of `agent run`]
    python examples/weather/demo.py --resume RUN [options of `agent resume`]

With AGENT_LLM__MODEL set that model does the work, else a scripted one, which is a real HTTP server on loopback. Sandboxes
are Docker containers when an engine answers and the images are built, else bubblewrap's. On Docker the agent also has a tool
of others: `third_party.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from third_party import offered_in, say

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "data" / "seattle-weather.csv"
READY_S = 30.0
AGENT = (sys.executable, "-m", "agent")


def main() -> int:
    parser = argparse.ArgumentParser(description="Analyse four years of Seattle's weather, end to end.")
    parser.add_argument(
        "--runtime", choices=("auto", "docker", "bubblewrap"), help="sandboxes; chosen by itself without it"
    )
    parser.add_argument("--resume", metavar="RUN", help="go on with a run of the demo that did not end")
    parser.add_argument("--runs-dir", metavar="DIR", help="where runs are kept; ./runs without it")
    options, more = parser.parse_known_args()
    if os.environ.get("AGENT_LLM__MODEL"):
        say(f"Model: {os.environ['AGENT_LLM__MODEL']}")
        return work(options, more, {})
    with scripted_model() as base_url:
        say(f"Model: scripted, at {base_url}. Set AGENT_LLM__MODEL to use a real one.")
        return work(options, more, {"AGENT_LLM__MODEL": "scripted-weather", "AGENT_LLM__BASE_URL": base_url})


def work(options: argparse.Namespace, more: list[str], settings: dict[str, str]) -> int:
    """Run the agent with its output shown; its exit code."""
    goal = (HERE / "goal.txt").read_text("utf-8").strip()
    command = [*AGENT, *(("resume", options.resume) if options.resume else ("run", goal, "--file", str(DATA))), *more]
    if options.runs_dir:
        command += ["--runs-dir", options.runs_dir]
    if not (os.environ.get("AGENT_TOOLSERVER__URL") or "--toolserver" in more):
        chosen = options.runtime or os.environ.get("AGENT_TOOLSERVER__RUNTIME") or best_runtime()
        say(f"Sandboxes: {chosen}")
        command += ["--runtime", chosen]
        settings |= added_tools(chosen, Path(options.runs_dir or os.environ.get("AGENT_RUNS_DIR") or "runs"))
    # the scripted model ends with us, so that `agent resume` alone would find none
    settings["AGENT_RESUME_COMMAND"] = how_to_resume(options.runtime)
    with subprocess.Popen(command, env={**os.environ, **settings}) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the agent got it too and ends in order
                continue


def added_tools(runtime: str, runs: Path) -> dict[str, str]:
    """The state folder with the demo's third-party tool: not the user's own, where it would stay for every run."""
    if (best_runtime() if runtime == "auto" else runtime) != "docker":
        say("Third-party tool: left out, since images of others need Docker: an engine, and once `make images`.")
        return {}
    state_dir = (runs / "added-tools").resolve()
    return {"TOOLSERVER_STATE_DIR": str(state_dir)} if offered_in(state_dir) else {}


def how_to_resume(runtime: str | None) -> str:
    """The command that goes on with a run, but for the run's id; as short as the working folder allows."""
    program, script = (min(path, os.path.relpath(path), key=len) for path in (sys.executable, str(HERE / "demo.py")))
    return shlex.join([program, script, *(["--runtime", runtime] if runtime else []), "--resume"])


def best_runtime() -> str:
    """Docker when an engine answers and has the images of this version, else bubblewrap."""
    image = f"toolcrib/workspace:{version('toolcrib')}"
    try:
        found = subprocess.run(["docker", "image", "inspect", image], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "bubblewrap"
    return "docker" if found.returncode == 0 else "bubblewrap"


@contextmanager
def scripted_model() -> Iterator[str]:
    """The address of a scripted model that ends with the block, or with us."""
    with tempfile.TemporaryDirectory(prefix="toolcrib-demo-") as folder:
        ready = Path(folder) / "ready.json"
        command = [
            *AGENT,
            "mock",
            str(HERE / "script.toml"),
            "--port",
            "0",
            "--ready-file",
            str(ready),
            "--exit-with-parent",
        ]
        # in a session of its own, so that Ctrl-C does not take it away from the agent that is about to stop in order
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                yield wait_until_ready(process, ready)
            finally:
                process.terminate()


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path) -> str:
    ends_at = time.monotonic() + READY_S
    while time.monotonic() < ends_at and process.poll() is None:
        if ready.exists():
            return str(json.loads(ready.read_text("utf-8"))["url"])
        time.sleep(0.05)
    raise SystemExit("The scripted model did not start; its message stands above.")


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:  # before there was a run
        raise SystemExit(130) from None
