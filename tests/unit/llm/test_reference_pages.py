"""The reference pages name every switch, and their examples are scripts that load."""

import re
import tomllib
from pathlib import Path

import pytest

from agent.llm.mock_distortions import DISTORTIONS
from agent.llm.mock_faults import DAMAGES, REFUSALS
from agent.llm.mock_quirks import Quirk
from agent.llm.mock_script import Rule, ScriptedReply, load_script, parse_script
from agent.llm.model import ToolSpec
from agent.planning.draft import DRAFT_SCHEMA
from agent.roles import schemas
from agent.settings import LLMSettings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/mock-scripts.md").read_text("utf-8")
LLM_PAGE = (ROOT / "docs/reference/llm.md").read_text("utf-8")


@pytest.mark.parametrize("name", sorted({*REFUSALS, *DISTORTIONS, *DAMAGES}))
def test_every_quirk_is_documented(name: str) -> None:
    assert f"`{name}`" in PAGE


@pytest.mark.parametrize(
    "name", [*Rule.model_fields, *ScriptedReply.model_fields, *sorted(set(Quirk.model_fields) - {"name"})]
)
def test_every_field_is_documented(name: str) -> None:
    assert re.search(rf"`{name}\b", PAGE)


@pytest.mark.parametrize("name", LLMSettings.model_fields)
def test_every_setting_of_the_model_is_documented(name: str) -> None:
    assert f"`{name}`" in LLM_PAGE


@pytest.mark.parametrize(
    "tool", [schemas.SUBMIT_PLAN, schemas.REFINE_PLAN, schemas.SUBMIT_VERDICT, schemas.SUBMIT_REFLECTION, schemas.SUBTASK_SUBMIT],
    ids=lambda tool: tool.name,
)  # fmt: skip
def test_every_argument_of_the_roles_tools_is_documented(tool: ToolSpec) -> None:
    (line,) = re.findall(rf"^\|.*`{tool.name}`.*$", PAGE, re.MULTILINE)
    required = set(tool.parameters["required"])
    for name in tool.parameters["properties"]:
        assert (f"**`{name}`**" if name in required else f"`{name}`") in line


def test_every_field_of_a_task_is_documented() -> None:
    (paragraph,) = re.findall(r"^A task has .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    for name in DRAFT_SCHEMA["properties"]:
        assert (f"**`{name}`**" if name in DRAFT_SCHEMA["required"] else f"`{name}`") in paragraph


def test_the_examples_of_the_page_are_scripts() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        parse_script(tomllib.loads(block))


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "examples").glob("*/script.toml"), *(ROOT / "examples/scripts").rglob("*.toml")]),
    ids=lambda path: path.name,
)
def test_the_shipped_scripts_load(path: Path) -> None:
    assert load_script(path).rule
