"""The official conformance suite against /mcp: what does not pass is listed with its reason, and what is listed does not pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from tests.integration.mcp_clients.loopback import Loopback

HERE = Path(__file__).parent
DOCUMENTED = HERE.parents[2] / "docs" / "reference" / "mcp-conformance.md"
LIMIT_S = 300
PASSED = frozenset({"SUCCESS", "INFO"})

# a run's name -> the folder of the suite's release, what it is asked, and how many scenarios that is at least
RUNS = {
    "2026-07-28": ("@modelcontextprotocol/conformance", ["--requirements", "2026-07-28"], 50),
    "2025-11-25": ("@modelcontextprotocol/conformance", ["--requirements", "2025-11-25"], 33),
    "released": ("conformance-released", ["--suite", "all", "--spec-version", "2025-11-25"], 32),
}

Check = tuple[str, str]


@dataclass(frozen=True)
class Excluded:
    runs: list[str]
    scenarios: list[str]
    reason: str
    checks: list[str] | None = None

    def holds_for(self, check: Check) -> bool:
        scenario, name = check
        return any(fnmatch(scenario, one) for one in self.scenarios) and (self.checks is None or name in self.checks)


def excluded(run: str) -> list[Excluded]:
    entries = tomllib.loads((HERE / "conformance_excluded.toml").read_text())["excluded"]
    return [one for one in (Excluded(**entry) for entry in entries) if any(fnmatch(run, name) for name in one.runs)]


def results(folder: Path) -> dict[Check, list[str]]:
    """Of each check what came out, as often as it was made, with what the suite said."""
    found: dict[Check, list[str]] = {}
    for place in folder.iterdir():
        scenario = re.sub(r"-\d{4}-\d\d-\d\dT.*", "", place.name.removeprefix("server-"))
        for check in json.loads((place / "checks.json").read_text()):
            told = check["status"] if check["status"] in PASSED else f"{check['status']}: {check.get('errorMessage')}"
            found.setdefault((scenario, check["id"]), []).append(told)
    return found


@pytest.mark.docker
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", RUNS)
def test_the_suite_passes_but_for_what_is_excluded(
    run: str, relay: Loopback, client_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    warm(relay.url)
    left_out = excluded(run)
    found = results_of(run, client_folder("node"), relay.url, tmp_path / "once")
    if unforeseen(
        found, left_out
    ):  # on a busy machine it may be a clock of the suite's own, such as half a second for a call
        again = results_of(run, client_folder("node"), relay.url, tmp_path / "again")
        found = {check: told if PASSED.issuperset(told) else again.get(check, told) for check, told in found.items()}
    assert not (told := unforeseen(found, left_out)), "\n".join(told)
    failed = {check for check, told in found.items() if not PASSED.issuperset(told)}
    assert not (stale := stale_entries(left_out, {scenario for scenario, _ in found}, failed)), stale


def warm(url: str) -> None:
    """Has the session made that all calls of the stateless revision work in, with the sandbox of the tools."""
    revision, name = "2026-07-28", "test_simple_text"
    about = {"io.modelcontextprotocol/protocolVersion": revision, "io.modelcontextprotocol/clientCapabilities": {}}
    params = {"name": name, "arguments": {}, "_meta": about}
    head = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": revision,
        "Mcp-Method": "tools/call",
        "Mcp-Name": name,
    }
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    answer = httpx.post(url, json=body, headers=head, timeout=60, trust_env=False)
    assert "simple text response" in answer.text, answer.text


def results_of(run: str, node: Path, url: str, folder: Path) -> dict[Check, list[str]]:
    """Of each check of a run of the suite what came out."""
    suite, asked, least = RUNS[run]
    folder.mkdir()
    program = node / "node_modules" / suite / "dist" / "index.js"
    command = [str(node / "bin" / "node"), str(program), "server", "--url", url, "-o", str(folder), *asked]
    environment = {**os.environ, "PATH": f"{node / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )  # fmt: skip
    found = results(folder)
    assert len({scenario for scenario, _ in found}) >= least, (done.stdout + done.stderr)[-3000:]
    return found


def unforeseen(found: dict[Check, list[str]], left_out: list[Excluded]) -> list[str]:
    """What did not pass and is not excluded."""
    return [
        f"{':'.join(check)}: {told}"
        for check, told in found.items()
        if not PASSED.issuperset(told) and not any(one.holds_for(check) for one in left_out)
    ]


def stale_entries(left_out: list[Excluded], scenarios: set[str], failed: set[Check]) -> list[str]:
    """What is excluded and passes: scenarios where nothing fails, checks that pass."""
    stale: list[str] = []
    for one in left_out:
        meant = {name for name in scenarios for pattern in one.scenarios if fnmatch(name, pattern)}
        if one.checks is None:
            stale += [name for name in sorted(meant) if not any(name == scenario for scenario, _ in failed)]
        else:
            stale += [f"{name}:{check}" for name in meant for check in one.checks if (name, check) not in failed]
    return stale


def test_a_listed_check_that_passes_is_noticed() -> None:
    one = Excluded(["*"], ["prompts-*"], "because")
    other = Excluded(["*"], ["caching"], "because", ["a", "b"])
    scenarios, failed = {"prompts-get", "prompts-list", "caching"}, {("prompts-get", "x"), ("caching", "a")}
    assert stale_entries([one, other], scenarios, failed) == ["prompts-list", "caching:b"]


def test_the_reference_tells_each_exclusion() -> None:
    told = " ".join(DOCUMENTED.read_text().split())
    entries = [
        Excluded(**entry) for entry in tomllib.loads((HERE / "conformance_excluded.toml").read_text())["excluded"]
    ]
    for entry in entries:
        assert entry.reason in told, f"{DOCUMENTED.name} does not tell why {entry.scenarios} are left out"
        for name in (*entry.scenarios, *(entry.checks or ())):
            assert f"`{name}`" in told, f"{DOCUMENTED.name} does not name {name}"
