from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.unit.toolserver.crib import catalog, new_runtime, settings
from toolserver.app import ToolServer
from toolserver.errors import StartRefused
from toolserver.settings import TelemetrySettings
from toolserver.telemetry.spans import open_spans


@pytest.fixture
def without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "toolserver.telemetry.otlp", raising=False)


def test_nobody_asks_for_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    monkeypatch.delitem(sys.modules, "toolserver.telemetry.otlp", raising=False)
    assert open_spans(None, "1") is None
    assert "toolserver.telemetry.otlp" not in sys.modules


@pytest.mark.usefixtures("without_the_extra")
def test_spans_that_are_set_without_their_packages_refuse_the_start(tmp_path: Path) -> None:
    chosen = settings(tmp_path, telemetry={"otlp_endpoint": "http://127.0.0.1:9"})
    with pytest.raises(StartRefused, match=r"toolcrib\[otel\]"):
        ToolServer(chosen, new_runtime(chosen), catalog())


@pytest.mark.usefixtures("without_the_extra")
def test_a_variable_meant_for_all_programs_is_only_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert open_spans(None, "1") is None
    assert [record.getMessage() for record in caplog.records] == ["spans_off"]


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", ""])
def test_an_endpoint_is_a_url(url: str) -> None:
    with pytest.raises(ValidationError):
        TelemetrySettings(otlp_endpoint=url)
