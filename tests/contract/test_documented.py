"""What the server can answer, take and be told stands in docs/reference, and nothing stands there that it can't."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from agent.settings import Settings as AgentSettings
from toolserver.api.application import routes
from toolserver.api.mcp import McpEndpoint
from toolserver.app import ToolServer
from toolserver.errors import CODES
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.settings import Settings

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_every_code_is_documented_with_its_meaning() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (\d{3}) \| (\w+) \| (\w+) \| (\w+) \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE
    )
    documented = {code: (int(status), fault, retry == "yes", effects) for code, status, fault, retry, effects in rows}
    assert documented == {str(c): (m.status, m.fault, m.retryable, m.effects) for c, m in CODES.items()}


def test_every_route_is_documented() -> None:
    text = (REFERENCE / "http-api.md").read_text()
    documented = {
        (m, p.split("?")[0]) for m, p in re.findall(r"`(GET|POST|PUT|DELETE) (/[^`]*)`", text.split("## Sessions")[0])
    }
    served = {(r.method, re.sub(r":\w+}", "}", r.path)) for r in routes(McpEndpoint())} | {("GET", "/openapi.json")}
    assert documented == served


def _names(model: type[BaseModel], prefix: str = "") -> set[str]:
    names: set[str] = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        section = isinstance(kind, type) and issubclass(kind, BaseModel)
        names |= _names(kind, f"{prefix}{name}.") if section else {prefix + name}  # type: ignore[arg-type]
    return names


def test_every_setting_is_documented() -> None:
    toolserver, agent = (REFERENCE / "settings.md").read_text().partition("## ToolServer")[2].split("\n## Agent\n")
    assert _in_table(toolserver) == _names(Settings)
    of_the_model = {name for name in _names(AgentSettings) if name.startswith("llm.")}  # llm.md has these
    assert _in_table(agent) == _names(AgentSettings) - of_the_model


def _in_table(text: str) -> set[str]:
    return set(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))


async def test_every_metric_is_documented(tmp_path: Path) -> None:
    chosen = Settings(state_dir=tmp_path, runtime={"name": "fake"})
    server = ToolServer(chosen, FakeRuntime("test", tmp_path, chosen.runtime))
    shown = set(re.findall(r"^# TYPE (\S+)", server.metrics.render(), re.MULTILINE))
    table = (REFERENCE / "observability.md").read_text().partition("## Metrics")[2]
    assert set(re.findall(r"`((?:toolserver|process)_\w+)`", table)) == shown


@pytest.mark.parametrize("status", [401, 403, 404, 409, 410, 413, 422, 429, 450, 500, 503])
def test_statuses_of_the_contract_have_codes(status: int) -> None:
    assert [code for code, meaning in CODES.items() if meaning.status == status]
