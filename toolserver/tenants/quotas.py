"""What each tenant may have, what it has, and the refusal that says which bound was met."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolserver.errors import Code, ToolServerError
from toolserver.settings import SessionSettings, TenantSettings

_SLOTS = 96  # the window of CPU time moves on in steps of this part of it
_HOUR_S = 3600.0


@dataclass(frozen=True)
class TenantLimits:
    """None: no limit of its own. `cpu_s` is within the window of the settings."""

    sessions: int | None = None
    calls: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    cpu_s: float | None = None

    @classmethod
    def defaults(cls, session: SessionSettings, tenant: TenantSettings) -> TenantLimits:
        return cls(
            session.max_sessions_per_tenant,
            tenant.max_calls,
            tenant.max_memory_mb,
            tenant.max_disk_mb,
            tenant.max_cpu_s,
        )

    def changed(self, own: Mapping[str, float | None]) -> TenantLimits:
        """With a tenant's own bounds where it has some."""
        return replace(self, **{name: value for name, value in own.items() if value is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Held:
    """What a tenant's sessions were granted: those that are live, being made, or waiting to be made."""

    sessions: int = 0
    memory_mb: int = 0
    disk_mb: int = 0


class CpuMeter:
    """CPU seconds of each tenant's ended calls within a moving window. `clock` gives seconds since 1970."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.time) -> None:
        self.window_s, self._clock = window_s, clock
        self.slot_s = window_s / _SLOTS
        self._slots: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._sums: defaultdict[str, float] = defaultdict(float)

    def add(self, tenant: str, cpu_s: float, at: float | None = None) -> None:
        slot = int((self._clock() if at is None else at) / self.slot_s)
        slots = self._slots[tenant]
        slots[slot] = slots.get(slot, 0.0) + cpu_s
        self._sums[tenant] += cpu_s

    def used_s(self, tenant: str) -> float:
        slots = self._slots.get(tenant)
        if not slots:
            return 0.0
        now = int(self._clock() / self.slot_s)
        while slots and (first := next(iter(slots))) <= now - _SLOTS:
            self._sums[tenant] -= slots.pop(first)
        return self._sums[tenant] if slots else 0.0

    def free_in_s(self, tenant: str, limit_s: float) -> float:
        """Until enough of it is out of the window that less than `limit_s` is used."""
        used, now = self.used_s(tenant), self._clock()
        for slot, cpu_s in self._slots[tenant].items():
            used -= cpu_s
            if used < limit_s:
                return max(1.0, (slot + _SLOTS + 1) * self.slot_s - now)
        return self.window_s


class Quotas:
    def __init__(self, session: SessionSettings, tenant: TenantSettings) -> None:
        self._defaults = TenantLimits.defaults(session, tenant)
        self._own: dict[str, TenantLimits] = {}
        self.cpu = CpuMeter(tenant.cpu_window_h * _HOUR_S)

    def limits(self, tenant: str) -> TenantLimits:
        return self._own.get(tenant, self._defaults)

    def load(self, own: Iterable[tuple[str, Mapping[str, float | None]]]) -> None:
        """Take over what `toolserver tenants set` says, of all tenants."""
        self._own = {tenant: self._defaults.changed(limits) for tenant, limits in own}

    def check_session(self, tenant: str, held: Held, memory_mb: int, disk_mb: int) -> None:
        """One session more of that size. Raises quota_exceeded."""
        limits = self.limits(tenant)
        less = "Ask for less with limits.{}, or delete a session first."
        for bound in (
            _Bound("sessions", "sessions", held.sessions, 1, limits.sessions),
            _Bound("memory_mb", "memory in MiB", held.memory_mb, memory_mb, limits.memory_mb),
            _Bound("disk_mb", "disk in MiB", held.disk_mb, disk_mb, limits.disk_mb),
        ):
            if bound.is_met:
                raise bound.refusal("Delete one first." if bound.quota == "sessions" else less.format(bound.quota))

    def check_call(self, tenant: str, running: int) -> None:
        """One call more. Raises quota_exceeded."""
        limits = self._own.get(tenant, self._defaults)
        if limits.calls is not None and running >= limits.calls:
            bound = _Bound("calls", "calls at a time", running, 1, limits.calls)
            raise bound.refusal("Wait until one has ended.")
        if limits.cpu_s is not None and (used := self.cpu.used_s(tenant)) >= limits.cpu_s:
            window = f"CPU seconds within {self.cpu.window_s / _HOUR_S:g} h"
            free_in_s = math.ceil(self.cpu.free_in_s(tenant, limits.cpu_s))
            bound = _Bound("cpu_s", window, round(used, 1), None, limits.cpu_s)
            raise bound.refusal(f"Try again in {free_in_s} s.", free_in_s)


@dataclass(frozen=True)
class _Bound:
    """`what` is it in words; `asked` is how much more is wanted, where that is known."""

    quota: str
    what: str
    used: float
    asked: float | None
    limit: float | None

    @property
    def is_met(self) -> bool:
        return self.limit is not None and self.used + (self.asked or 0) > self.limit

    def refusal(self, advice: str, retry_after_s: float | None = None) -> ToolServerError:
        limit = self.limit or 0
        left = max(0, limit - self.used)
        extra: dict[str, Any] = {"quota": self.quota, "used": self.used, "limit": limit, "left": left}
        wanted = ""
        if self.asked is not None:
            extra["asked"] = self.asked
            wanted = f", {self.asked:g} more asked for, {left:g} left"
        message = f"The tenant's quota of {self.what} is met: {self.used:g} of {limit:g} used{wanted}. Nothing was run. {advice}"
        return ToolServerError(Code.QUOTA_EXCEEDED, message, retry_after_s=retry_after_s, extra=extra)
