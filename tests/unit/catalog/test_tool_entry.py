"""Entries of added images: nothing can be granted that has no field, and what does not fit together is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from toolserver.catalog.added import in_engine, load_added, references
from toolserver.settings import Settings
from toolserver.store.tool_images import Approval, Drift, ToolImageRow
from toolserver.tool_entry import ToolEntry

DOCUMENTED = (Path(__file__).parents[3] / "docs" / "reference" / "tool-images.md").read_text()
LISTED = [{"name": "say", "description": "Says it all.", "inputSchema": {"type": "object"}}]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"privileged": True}, "privileged"),
        ({"cap_add": ["ALL"]}, "cap_add"),
        ({"volumes": ["/:/host"]}, "volumes"),
        ({"network": "host"}, "network"),
        ({"user": "root"}, "user"),
        ({"secrets": {"A": "hunter2"}}, "never the value itself"),
        ({"secrets": {"A": "file:relative"}}, "absolute"),
        ({"secrets": {"A B": "env:X"}}, "no name of an environment variable"),
        ({"env": {"A": "x"}, "secrets": {"A": "env:X"}}, "in env and in secrets"),
        ({"env": {"A": "x\0y"}}, "NUL"),
        ({"scope": "shared", "workspace": "rw"}, "shared sandbox"),
        ({"egress": ["http://x/"]}, "egress"),
        ({"header_secrets": [{"host": "x.org", "header": "A", "source": "env:X"}]}, "egress is none"),
        ({"header_secrets": [{"host": "x.org", "header": "A\r\nB", "source": "env:X"}], "egress": "open"}, "header"),
        ({"rename": {"a": "x", "b": "x"}}, "one name to two"),
        ({"rename": {"a": "x y"}}, "no name for a tool"),
        ({"kind": "cli"}, "has commands"),
        ({"limits": {"memory_mb": 1}}, "memory_mb"),
        ({"working_dir": "relative"}, "working_dir"),
        ({"image": "--privileged"}, "image"),
    ],
)
def test_what_is_not_to_be_had_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ToolEntry.model_validate({"image": "x", **fields})
    assert why in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_every_field_is_documented() -> None:
    table = DOCUMENTED.split("| field | default | |")[1].split("\n\n")[0]
    documented = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert documented == set(ToolEntry.model_fields)


@pytest.mark.parametrize("name", ["Workspace", "web", "toolserver", "a b", "../x", "x" * 60])
def test_settings_refuse_names_that_are_not_to_be_had(name: str) -> None:
    with pytest.raises(ValidationError, match="no name for an added image"):
        Settings(tools={name: {"image": "x"}})


def row(name: str, listed: list[dict[str, Any]] = LISTED, **over: Any) -> ToolImageRow:
    names = {str(tool["name"]): str(tool["name"]) for tool in listed}
    approval = Approval("x:1", "sha256:aa", listed, names, None, 1.0)
    return ToolImageRow(**{"name": name, "entry": {"image": "x:1"}, "added_at": 1.0, "approval": approval, **over})


def states(*rows: ToolImageRow, ids: dict[str, str] | None = None) -> dict[str, tuple[str, str | None]]:
    presence = in_engine(rows, {"sha256:aa": "sha256:aa"} if ids is None else ids)
    return {one.name: (one.state, one.reason or one.notice) for one in load_added(rows, {}, [], presence)}


def test_only_what_was_approved_and_is_there_is_offered() -> None:
    assert references([row("a"), row("b")]) == ["sha256:aa", "x:1"]
    assert states(row("a")) == {"a": ("approved", None)}
    assert states(row("a", approval=None))["a"][0] == "new"
    assert states(row("a", drift=Drift(listed=[])))["a"][0] == "changed"
    assert "removed say" in str(states(row("a", drift=Drift(listed=[])))["a"][1])
    assert states(row("a", entry={"image": "y:2"}))["a"][0] == "changed"
    assert states(row("a", entry={"image": "x:1", "privileged": True}))["a"][0] == "refused"
    state, why = states(row("a"), ids={"x:1": "sha256:bb"})["a"]
    assert (state, "x:1 is sha256:bb there" in str(why)) == ("unusable", True)
    state, notice = states(row("a"), ids={"sha256:aa": "sha256:aa", "x:1": "sha256:bb"})["a"]
    assert (state, "another image now" in str(notice)) == ("approved", True)


def test_of_two_that_have_a_name_the_earlier_one_keeps_it() -> None:
    first, second = row("a"), row("b")
    found = load_added([first, second], {}, [], in_engine([first], {"sha256:aa": "sha256:aa"}))
    images = [one.image for one in found]
    assert [[tool.name for tool in image.tools] for image in images if image] == [["say"], ["b.say"]]
    assert all(tool.retry == "never" for image in images if image for tool in image.tools)
