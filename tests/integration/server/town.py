"""A small internet of a test's own: network namespaces with public addresses, names that lie, and listeners that tell who came.

The server's machine is one namespace, the world another, with a link between them:

    machine   where the proxy is. Canaries listen on ports 80, 443 and 8080 of every address it has, the public OWN too.
    world     has PUBLIC, where the sites are, on ports 80 and 443, and a resolver.

Needs root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.integration.server.town_sites import OWN, PUBLIC

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Town:
    machine: str  # its namespace
    resolver: str  # an address of the world, and no public one
    reached: str  # an address of the machine that this process reaches
    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that vouches for its sites."""
        return self.folder / "authority.pem"

    def guests(self) -> list[tuple[str, int, str]]:
        """Who came: the local address, the port, and the head of the request, of each connection."""
        lines = (self.folder / "guests.jsonl").read_text().splitlines()
        return [(told["address"], told["port"], told["head"]) for told in map(json.loads, lines)]

    def burnt(self) -> list[tuple[str, int]]:
        """Connections that must not have been."""
        return [(address, port) for address, port, _ in self.guests() if address != PUBLIC]


def _prefix(machine: str) -> str:
    return f"10.213.{zlib.crc32(machine.encode()) % 250}"


def resolver_of(machine: str) -> str:
    """The address that its resolver will have."""
    return f"{_prefix(machine)}.5"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _within(namespace: str, *command: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}", *command]


@contextmanager
def container_machine(name: str) -> Iterator[None]:
    """A container without a network of the engine's; `container:NAME` is then the network, and the resolver_of(name), of a proxy."""
    command = [
        "docker",
        "run",
        "--detach",
        "--rm",
        "--name",
        name,
        "--network",
        "none",
        "--dns",
        resolver_of(name),
        "--entrypoint",
        "sleep",
    ]
    subprocess.run([*command, f"toolcrib/egress:{version('toolcrib')}", "infinity"], check=True, capture_output=True)
    try:
        shown = ["docker", "inspect", "-f", "{{.State.Pid}}", name]
        pid = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()
        subprocess.run(["ip", "netns", "attach", name, pid], check=True)
        yield
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False)
        subprocess.run(["docker", "rm", "--force", name], check=False, capture_output=True)


@contextmanager
def town(machine: str, folder: Path) -> Iterator[Town]:
    """`machine`: a namespace that there is, with nothing in it."""
    world, (host_end, reached, near_end) = f"{machine}w", (f"{_prefix(machine)}.{last}" for last in (1, 2, 6))
    inner_end = resolver_of(machine)
    programs: list[subprocess.Popen[bytes]] = []
    folder.mkdir(parents=True, exist_ok=True)
    _run("ip", "netns", "add", world)
    try:
        _run("ip", "link", "add", f"{machine}h", "type", "veth", "peer", "name", "tohost", "netns", machine)
        _run("ip", "address", "add", f"{host_end}/30", "dev", f"{machine}h")
        _run("ip", "link", "set", f"{machine}h", "up")
        _run(
            *_within(
                world, "ip", "link", "add", "tomachine", "type", "veth", "peer", "name", "toworld", "netns", machine
            )
        )
        for namespace, address, link in (
            (machine, f"{reached}/30", "tohost"),
            (machine, f"{near_end}/30", "toworld"),
            (world, f"{inner_end}/30", "tomachine"),
            (world, f"{PUBLIC}/32", "lo"),
            (machine, f"{OWN}/32", "lo"),
        ):
            _run(*_within(namespace, "ip", "address", "add", address, "dev", link))
            _run(*_within(namespace, "ip", "link", "set", link, "up"))
        _run(*_within(machine, "ip", "link", "set", "lo", "up"))
        _run(*_within(machine, "ip", "route", "add", "default", "via", inner_end))
        for namespace, role in ((world, "sites"), (machine, "canaries")):
            command = [sys.executable, "-m", "tests.integration.server.town_sites", role, str(folder), reached]
            programs.append(subprocess.Popen(_within(namespace, *command), cwd=ROOT))
        until = time.monotonic() + 30
        while not all((folder / f"{role}.ready").exists() for role in ("sites", "canaries")):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield Town(machine, inner_end, reached, folder)
    finally:
        for program in programs:
            program.kill()
            program.wait()
        subprocess.run(["ip", "netns", "delete", world], check=False)
        subprocess.run(["ip", "link", "delete", f"{machine}h"], check=False, capture_output=True)
