"""What a Docker engine is and can, from what it tells of itself (`GET /info`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from toolserver.doctor.check import Check, check

CLOCKS_APART_S = 5.0
_LIMITS = {"MemoryLimit": "memory", "SwapLimit": "swap", "CpuCfsQuota": "cpus", "PidsLimit": "pids"}


def engine_checks(info: Mapping[str, Any]) -> list[Check]:
    """`info`: the engine's own, with "ApiVersion"."""
    return [
        check(
            "engine",
            f"{info.get('ServerVersion', 'unknown')}, API {info.get('ApiVersion', 'unknown')}, {info.get('Driver', 'unknown')} on "
            f"{_status(info, 'Backing Filesystem')}, kernel {info.get('KernelVersion', 'unknown')}",
        ),
        _limits(info),
        _security(info),
        check("engine: runtimes", ", ".join(sorted(info.get("Runtimes") or {})) or "unknown"),
        check(
            "engine: live restore",
            "on: sandboxes outlive its restart; workspaces are not on loop devices"
            if info.get("LiveRestoreEnabled")
            else "off: its restart ends all sandboxes; files are kept",
        ),
        _clocks(info),
    ]


def _status(info: Mapping[str, Any], name: str) -> str:
    return next((str(value) for key, value in info.get("DriverStatus") or [] if key == name), "an unknown file system")


def _limits(info: Mapping[str, Any]) -> Check:
    missing = [told for name, told in _LIMITS.items() if info.get(name) is False]
    found = f"version {info.get('CgroupVersion', 'unknown')}, driver {info.get('CgroupDriver', 'unknown')}"
    advice = f"It can't limit {', '.join(missing)}: enable these controllers on its host." if missing else ""
    if "rootless" in _options(info) and info.get("CgroupVersion") == "1":
        advice = "It is rootless on control groups of version 1, where limits are silently ignored: take version 2, or an engine with root."
    return check("engine: control groups", found, advice)


def _options(info: Mapping[str, Any]) -> dict[str, str]:
    """Such as {"seccomp": "profile=default", "rootless": ""}."""
    found = {}
    for option in info.get("SecurityOptions") or []:
        name, _, rest = str(option).removeprefix("name=").partition(",")
        found[name] = rest
    return found


def _security(info: Mapping[str, Any]) -> Check:
    options = _options(info)
    missing = (
        ""
        if "seccomp" in options
        else "It has no seccomp: system calls of sandboxes are not filtered. Take another build or kernel."
    )
    extra = [name for name in ("userns", "rootless", "apparmor", "selinux") if name in options]
    return check("engine: security", ", ".join(["seccomp" if "seccomp" in options else "no seccomp", *extra]), missing)


def _clocks(info: Mapping[str, Any]) -> Check:
    try:
        theirs = datetime.fromisoformat(str(info.get("SystemTime"))[:19] + "+00:00").timestamp()
    except ValueError:
        return check("engine: clock", "not told")
    apart = abs(theirs - time.time())
    far = "Set both clocks by NTP: leases and logs go by them." if apart > CLOCKS_APART_S else ""
    return check("engine: clock", f"{apart:.0f} s from the server's", far)
