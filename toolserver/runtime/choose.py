"""Which driver runs the sandboxes, and a sentence on what it does weaker than the strongest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolserver.errors import RequirementMissing, RuntimeUnavailable
from toolserver.runtime.base import SandboxRuntime
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.docker_runtime import DockerRuntime, engine_answers
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.settings import RuntimeSettings

PROBE_TIMEOUT_S = 2.0


async def choose_runtime(
    settings: RuntimeSettings, server_id: str, state_dir: Path, egress_network: str = "bridge"
) -> tuple[SandboxRuntime, str | None]:
    """The driver that the settings name, not yet opened, and what is weaker about it (None: nothing). Raises RequirementMissing.

    `auto` takes docker when an engine answers within 2 s, else bubblewrap when that works here, else docker, whose
    engine may come up later. `egress_network`: as DockerRuntime has it. With gVisor required it is docker or nothing.
    """
    if settings.isolation == "require-gvisor":
        if settings.name in ("bubblewrap", "fake"):
            raise RequirementMissing(
                f"TOOLSERVER_RUNTIME__ISOLATION is require-gvisor, which the runtime {settings.name} does not have: use docker."
            )
        return DockerRuntime(server_id, state_dir, settings, egress_network), None
    match settings.name:
        case "docker":
            return DockerRuntime(server_id, state_dir, settings, egress_network), None
        case "fake":
            return FakeRuntime(server_id, state_dir, settings), "The fake runtime isolates nothing: for tests only."
    bubblewrap = BubblewrapRuntime(server_id, state_dir, settings)
    if settings.name == "bubblewrap":
        return bubblewrap, bubblewrap.weaker()
    if await engine_answers(settings, PROBE_TIMEOUT_S):
        return DockerRuntime(server_id, state_dir, settings, egress_network), None
    try:
        await bubblewrap.check()
    except RuntimeUnavailable as why:
        return DockerRuntime(server_id, state_dir, settings, egress_network), f"No Docker engine answers, and: {why}"
    return bubblewrap, f"No Docker engine answers, so sandboxes are made by bubblewrap. {bubblewrap.weaker()}"


def weaknesses(isolation: dict[str, Any]) -> list[str]:
    """What of a runtime's `isolation` does not fully hold on this host, one line each."""
    return [
        f"{what}: {how}"
        for what, how in isolation.items()
        if what != "runtime" and how not in ("gvisor", "shared", "none") and not how.startswith("enforced")
    ]
