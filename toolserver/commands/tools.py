"""`toolserver tools`: which tool images there are beside the server's own, and what each was granted."""

# ruff: noqa: PLC0415 - imports wait for their command
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from toolserver.commands import tool_adding, tool_trying
from toolserver.commands.changes import change
from toolserver.commands.terminal import ConfigOption, JsonOption, StateOption, fail, load_settings, show, table, warn
from toolserver.commands.tool_images import (
    NameArgument,
    added_image,
    first_sentence,
    image_json,
    judged_lines,
    load_catalog,
    when,
)

if TYPE_CHECKING:
    from toolserver.tool_entry import ToolEntry

app = typer.Typer(
    no_args_is_help=True, help="The tools that sessions can have, and the images that are added for them."
)
app.command("add")(tool_adding.add)
app.command("approve")(tool_adding.approve)
app.command("check")(tool_trying.check)
app.command("new")(tool_trying.new)


@app.command("list")
def listing(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """The tools of the catalog, and the images that are not offered."""
    catalog = load_catalog(load_settings(config, state_dir))
    found = catalog.tools(None)
    rows = [["NAME", "IMAGE", "DESCRIPTION"]]
    rows += [[tool.name, tool.image, first_sentence(tool.description)] for tool in found]
    told = {
        "tools": [tool.as_json() for tool in found],
        "images": [image_json(one) for one in catalog.added.values()],
        "problems": list(catalog.problems),
    }
    show(as_json, told, lambda: table(rows))
    notices = (one.reason or one.notice for one in catalog.added.values())
    for problem in (*catalog.problems, *(notice for notice in notices if notice)):
        warn(problem)


@app.command("show")
def show_(
    name: NameArgument, config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False
) -> None:
    """One added image: what it was granted, what was approved, its tools."""
    one = added_image(load_catalog(load_settings(config, state_dir)), name)

    def lines() -> list[str]:
        told = [f"{one.name}: {one.state}, from the {one.where}"]
        told += [f"  {why}" for why in (one.reason, one.notice) if why]
        if one.entry is not None:
            told += [f"  {key}: {value}" for key, value in _granted(one.entry).items()]
        approval = one.row.approval if one.row is not None else None
        if approval is not None:
            told += [f"  digest: {approval.digest}", f"  approved: {when(approval.at)}"]
        if one.image is not None:
            told += ["  tools:", *(f"    {tool.name}: {first_sentence(tool.description)}" for tool in one.image.tools)]
        return told + judged_lines(one.judged)

    show(as_json, image_json(one), lines)


@app.command("remove")
def remove(
    name: NameArgument, config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False
) -> None:
    """Offer an added image no more. A running server ends its sandboxes within a few seconds."""
    from toolserver.store import tool_images

    settings = load_settings(config, state_dir)
    one = added_image(load_catalog(settings), name)
    if one.where == "settings":
        fail(f"{name} stands in the settings: take the section [tools.{name}] out of them, and start the server anew")
    change(
        settings,
        lambda connection: tool_images.remove(connection, name),
        lambda gone: ("tool_image_removed", {"image": name}) if gone else None,
    )
    show(as_json, {"image": name, "removed": True}, lambda: [f"{name} is removed"])


def _granted(entry: ToolEntry) -> dict[str, Any]:
    return {key: value for key, value in entry.model_dump(exclude_defaults=True).items() if key != "commands"}
