"""Looks at all that decides what sandboxes are held to here: settings, runtime, host, engine, images."""

from __future__ import annotations

from typing import Any

from toolserver.app import server_id
from toolserver.doctor.check import Check, check
from toolserver.doctor.engine import engine_checks
from toolserver.doctor.host import host_checks
from toolserver.doctor.known_catalog import known_catalog
from toolserver.errors import RuntimeUnavailable, StartRefused, StoreUnavailable
from toolserver.images.build import missing_images, optional_images, outdated_images
from toolserver.images.definition import ImageBuildError
from toolserver.runtime.base import SandboxRuntime
from toolserver.runtime.choose import choose_runtime
from toolserver.settings import Settings

_ADVICE = {
    "memory": "Run the server as root, or as a service with Delegate=yes, or use Docker.",
    "cpus": "Run the server as root, or as a service with Delegate=yes, or use Docker.",
    "pids": "Take a newer kernel, or run the server as root.",
    "disk": "Run the server as root on the engine's host, the engine without live-restore, or put its data on xfs with pquota.",
    "kernel": "Install runsc (docs/how-to/gvisor.md), or set TOOLSERVER_RUNTIME__ISOLATION=runc.",
    "seccomp": "Use Docker.",
}


async def examine(settings: Settings) -> dict[str, Any]:
    """{"runtime", "isolation", "checks", "warnings", "problem"}; `problem` is the first, None when sandboxes can be started."""
    checks = host_checks(settings)
    isolation: dict[str, Any] = {}
    name: str = settings.runtime.name
    unusable: str | None = None
    try:
        runtime, weaker = await choose_runtime(
            settings.runtime, server_id(settings.state_dir), settings.state_dir, settings.egress.docker_network
        )
    except RuntimeUnavailable as why:
        checks.insert(0, check("sandboxes", "can't be started", str(why), problem=True))
    else:
        name = runtime.name
        checks[:0] = await _runtime_checks(runtime, weaker, settings.egress.max_mode)
        isolation, unusable = runtime.isolation(), runtime.added_problem()
        await runtime.close()
    if name == "docker" and not any(one.state == "problem" for one in checks):
        checks.append(_images(settings))
    checks += _catalog(settings, unusable)
    problems = [one.advice for one in checks if one.state == "problem"]
    return {
        "runtime": name,
        "isolation": isolation,
        "checks": [one.as_json() for one in checks],
        "warnings": [f"{one.name}: {one.found}. {one.advice}" for one in checks if one.state == "weaker"],
        "problem": problems[0] if problems else None,
    }


def _catalog(settings: Settings, unusable: str | None) -> list[Check]:
    try:
        catalog = known_catalog(settings, unusable)
    except (StartRefused, StoreUnavailable) as why:
        return [check("catalog", "can't be read", str(why), problem=True)]
    checks = [check("catalog", "an image is refused", problem) for problem in catalog.problems]
    for one in catalog.added.values():
        if one.reason is not None:
            checks.append(check(f"tools: {one.name}", f"not offered: {one.state}", one.reason))
        elif one.notice is not None:
            checks.append(check(f"tools: {one.name}", "its name stands for another image", one.notice))
    return checks


async def _runtime_checks(runtime: SandboxRuntime, weaker: str | None, egress: str) -> list[Check]:
    try:
        await runtime.open()
        await runtime.check()
    except RuntimeUnavailable as why:
        return [check("sandboxes", "can't be started", str(why), problem=True)]
    checks = [check("sandboxes", f"can be started by {runtime.name}", weaker or "")]
    for what, how in runtime.isolation().items():
        if what not in ("runtime", "network"):
            holds = how in ("gvisor", "shared") or how.startswith("enforced")
            checks.append(check(f"sandboxes: {what}", how, "" if holds else _ADVICE.get(what, "Use Docker.")))
    checks.append(await _egress(runtime, egress))
    facts = runtime.facts()
    return checks + (engine_checks(facts) if facts else [])


async def _egress(runtime: SandboxRuntime, max_mode: str) -> Check:
    if max_mode == "none":
        return check("egress", "off: egress.max_mode is none")
    try:
        problem = await runtime.egress_problem()
    except RuntimeUnavailable as why:
        problem = str(why)
    return check("egress", f"sessions get {max_mode} at most" if problem is None else "does not work", problem or "")


def _images(settings: Settings) -> Check:
    try:
        missing = [name for name in missing_images(settings.runtime.docker_host) if name not in optional_images()]
        outdated = outdated_images(settings.runtime.docker_host)
    except ImageBuildError as why:
        return check("images", "can't be listed", str(why), problem=True)
    if missing:
        build = f"Build them: toolserver images build {' '.join(missing)}"
        return check("images", f"missing: {', '.join(missing)}", build, problem=True)
    if outdated:
        return check("images", f"out of date: {', '.join(outdated)}", "Build them anew: toolserver images build")
    return check("images", "built")
