from __future__ import annotations

import pytest

from toolserver.errors import Code, ToolServerError
from toolserver.settings import SessionSettings, TenantSettings
from toolserver.tenants.quotas import CpuMeter, Held, Quotas


def quotas(**over: object) -> Quotas:
    return Quotas(SessionSettings(max_sessions_per_tenant=3), TenantSettings.model_validate(over))


def refusal(of: Quotas, held: Held, memory_mb: int = 10, disk_mb: int = 10) -> dict[str, object]:
    with pytest.raises(ToolServerError) as refused:
        of.check_session("t", held, memory_mb, disk_mb)
    assert refused.value.code is Code.QUOTA_EXCEEDED
    return refused.value.extra


def test_each_quota_of_a_session_is_named_with_its_figures() -> None:
    of = quotas(max_memory_mb=100, max_disk_mb=50)
    of.check_session("t", Held(2, 90, 40), 10, 10)
    assert refusal(of, Held(3, 0, 0)) == {"quota": "sessions", "used": 3, "limit": 3, "left": 0, "asked": 1}
    assert refusal(of, Held(1, 95, 0)) == {"quota": "memory_mb", "used": 95, "limit": 100, "left": 5, "asked": 10}
    assert refusal(of, Held(1, 0, 45)) == {"quota": "disk_mb", "used": 45, "limit": 50, "left": 5, "asked": 10}


def test_a_tenants_own_bounds_go_before_the_settings_and_can_be_taken_back() -> None:
    of = quotas(max_memory_mb=100)
    of.load([("t", {"sessions": 1, "memory_mb": None})])
    assert refusal(of, Held(1, 0, 0))["limit"] == 1
    assert refusal(of, Held(0, 95, 0))["limit"] == 100
    of.load([])
    of.check_session("t", Held(1, 0, 0), 10, 10)


def test_calls_and_cpu_time() -> None:
    of = quotas(max_calls=2, max_cpu_s=10.0)
    of.check_call("t", 1)
    with pytest.raises(ToolServerError, match="calls at a time"):
        of.check_call("t", 2)
    of.cpu.add("t", 10.0)
    of.check_call("other", 0)
    with pytest.raises(ToolServerError) as refused:
        of.check_call("t", 0)
    assert refused.value.extra == {"quota": "cpu_s", "used": 10.0, "limit": 10.0, "left": 0}
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s > 80_000


def test_the_window_of_cpu_time_moves_on() -> None:
    now = 0.0
    meter = CpuMeter(96.0, lambda: now)
    meter.add("t", 1.0)
    now = 50.0
    meter.add("t", 2.0)
    assert meter.used_s("t") == 3.0
    assert meter.free_in_s("t", 2.5) == 47.0
    assert meter.free_in_s("t", 0.5) == 97.0
    now = 97.0
    assert meter.used_s("t") == 2.0
    now = 1000.0
    assert meter.used_s("t") == 0.0
    assert meter.used_s("nobody") == 0.0
