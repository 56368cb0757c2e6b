from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.toolserver.crib import Crib, running, settings
from tests.unit.toolserver.events_client import EVENTS
from toolserver.errors import RuntimeUnavailable
from toolserver.telemetry.metrics import Metrics


async def families(crib: Crib) -> dict[str, Metric]:
    text = (await crib.client.get("/metrics")).text
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def value(family: Metric, name: str | None = None, **labels: str) -> float:
    found = [s.value for s in family.samples if (name is None or s.name == name) and s.labels == labels]
    assert len(found) == 1, (family.name, labels, [s.labels for s in family.samples])
    return float(found[0])


async def test_a_real_parser_reads_all_of_it(crib: Crib) -> None:
    session = await crib.session()
    await crib.call(session, "echo", {"text": "x"})
    path = f"/v1/sessions/{session}/tools/say"
    streamed = await crib.client.post(path, json={"arguments": {"lines": ["a"]}}, headers=EVENTS)
    found = await families(crib)
    assert value(found["toolserver_calls"], tool="echo", code="ok") == 1
    assert value(found["toolserver_streamed_bytes"]) == len(streamed.content)
    assert value(found["toolserver_sessions"], state="live") == 1
    assert value(found["toolserver_engine_up"]) == value(found["toolserver_store_up"]) == 1
    assert value(found["toolserver_epoch"]) == 1
    assert value(found["toolserver_calls_running"]) == value(found["toolserver_streams_open"]) == 0
    assert value(found["process_resident_memory_bytes"]) > 10 << 20
    assert value(found["process_open_fds"]) > 3
    assert value(found["process_cpu_seconds"]) > 0
    assert found["process_cpu_seconds"].type == found["toolserver_requests"].type == "counter"
    for family in found.values():
        assert family.documentation
        if family.type == "histogram":
            check_histogram(family.samples)
    stages = {s.labels["stage"] for s in found["toolserver_stage_seconds"].samples}
    assert {"start", "sandbox", "store"} <= stages <= {"queue", "start", "sandbox", "store"}


def check_histogram(samples: Iterable[object]) -> None:
    counts: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for sample in samples:
        name, labels, number = sample.name, dict(sample.labels), sample.value  # type: ignore[attr-defined]
        edge = labels.pop("le", None)
        place = tuple(labels.items())
        if name.endswith("_bucket"):
            counts.setdefault(place, []).append(number)
        elif name.endswith("_count"):
            assert counts[place][-1] == number
            assert edge is None
    for rising in counts.values():
        assert rising == sorted(rising)


async def test_what_callers_send_makes_no_new_lines(crib: Crib) -> None:
    session = await crib.session()
    await crib.call(session, "echo", {"text": "x"})
    await crib.call(session, "no_such_tool")
    await crib.client.get("/metrics")

    async def lines() -> set[str]:
        text = (await crib.client.get("/metrics")).text
        return {line.rsplit(" ", 1)[0] for line in text.splitlines()}

    await crib.client.request("BREW", "/v1/tools")  # once: its status may be new
    before = await lines()
    for number in range(20):
        await crib.call(session, f"no_such_tool_{number}")
        await crib.client.request(f"BREW{number}", f"/v1/tools/{number}")
        await crib.client.get(f"/v1/calls/none-{number}")
    new = await lines() - before
    assert not [line for line in new if "toolserver_requests_total" not in line], new
    assert len(new) <= 2


async def test_waiting_for_room_is_counted_and_timed(tmp_path: Path) -> None:
    async with running(settings(tmp_path, call={"max_running": 1})) as crib:
        session = await crib.session()
        first = asyncio.create_task(crib.call(session, "sleep", {"seconds": 0.5}))
        await asyncio.sleep(0.2)
        second = asyncio.create_task(crib.call(session, "echo", {"text": "x"}))
        await asyncio.sleep(0.1)
        assert value((await families(crib))["toolserver_queue_waiting"], queue="calls") == 1
        assert [(await call).status_code for call in (first, second)] == [200, 200]
        found = await families(crib)
        assert value(found["toolserver_queue_waiting"], queue="calls") == 0
        name = "toolserver_stage_seconds_count"
        assert value(found["toolserver_stage_seconds"], name, stage="queue") == 1


async def test_an_engine_that_is_away_shows(crib: Crib) -> None:
    crib.runtime.unavailable = "away"
    crib.server.readiness._checked = float("-inf")
    assert value((await families(crib))["toolserver_engine_up"]) == 0


async def test_an_engine_that_hangs_holds_nothing_up(crib: Crib, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()
        raise RuntimeUnavailable

    monkeypatch.setattr(crib.runtime, "check", hang)
    crib.server.readiness._checked = float("-inf")
    async with asyncio.timeout(10):
        assert value((await families(crib))["toolserver_engine_up"]) == 0


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.counter("a_total", "A.")
    metrics.count("a_total", 2.5, name='a\\b"c\nd')
    (family,) = text_string_to_metric_families(metrics.render())
    assert [(s.labels, s.value) for s in family.samples] == [({"name": 'a\\b"c\nd'}, 2.5)]
