"""`toolserver tools add` and `approve`: look at an image in a sandbox, and say what it may have."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolserver.commands import tool_options as options
from toolserver.commands.changes import change
from toolserver.commands.terminal import FAILED, ConfigOption, JsonOption, StateOption, fail, load_settings, show, warn
from toolserver.commands.tool_images import (
    NameArgument,
    added_image,
    count,
    guarded,
    image_facts,
    image_json,
    load_catalog,
    print_judged,
    refuse_name,
    refuse_reference,
)

if TYPE_CHECKING:
    from toolserver.catalog.asked import Asked
    from toolserver.catalog.offered import Judged
    from toolserver.doctor.trial import Introspection
    from toolserver.images.engine import ImageFacts
    from toolserver.settings import Settings
    from toolserver.store.tool_images import Approval
    from toolserver.tool_entry import ToolEntry

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def add(
    image: Annotated[str | None, typer.Argument(help="The engine's name of the image, such as mcp/time:1.2.")] = None,
    from_file: Annotated[
        Path | None,
        typer.Option("--from-file", help="server.json of an MCP registry, or a Docker MCP catalog (YAML, JSON)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What it is called here; by default made of its own name.")
    ] = None,
    kind: options.KindOption = "mcp",
    command: options.CommandOption = None,
    working_dir: options.WorkingDirOption = None,
    env: options.EnvOption = None,
    secret: options.SecretOption = None,
    header_secret: options.HeaderOption = None,
    workspace: options.WorkspaceOption = "none",
    egress: options.EgressOption = "none",
    scope: Annotated[
        str, typer.Option("--scope", help="session, or shared: one sandbox for all sessions of a tenant.")
    ] = "session",
    start: Annotated[str, typer.Option("--start", help="lazy: at the first call; eager: with the session.")] = "lazy",
    memory_mb: options.MemoryOption = None,
    cpus: Annotated[float | None, typer.Option("--cpus", help="Cores, below the session's.")] = None,
    pids: Annotated[int | None, typer.Option("--pids", help="Processes, below the session's.")] = None,
    disk_mb: Annotated[int | None, typer.Option("--disk-mb", help="MiB of disk, below the session's.")] = None,
    deadline_s: Annotated[float | None, typer.Option("--deadline-s", help="The most for a call of its tools.")] = None,
    retry: Annotated[str, typer.Option("--retry", help="never, or idempotent: its tools may be repeated.")] = "never",
    allow_tool: Annotated[
        list[str] | None, typer.Option("--allow-tool", help="Only this tool of the image. Repeatable.")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option("--rename", help="OWN=NAME: what a tool is called here. Repeatable.")
    ] = None,
    describe: Annotated[
        list[str] | None,
        typer.Option("--describe", help="OWN=TEXT: a description in place of the tool's own. Repeatable."),
    ] = None,
    cli: options.CliOption = None,
    stdin: options.StdinOption = None,
    output: options.OutputOption = "text",
    description: options.DescriptionOption = None,
    input_schema: options.SchemaOption = None,
    yes: YesOption = False,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at an image in a sandbox, and offer its tools. It gets nothing but what these options grant."""
    from toolserver.catalog.asked import name_of_reference, of_labels, plain_name

    settings = load_settings(config, state_dir)
    asked = _asked(image, from_file, name)
    reference = image or asked.fields["image"]
    refuse_reference(reference)
    facts = image_facts(settings, reference)
    labelled = of_labels(facts.labels)
    called = name or asked.name or labelled.name or name_of_reference(reference)
    refuse_name(load_catalog(settings), called, plain_name(called))
    granted_egress = options.egress(egress)
    fields: dict[str, Any] = {
        **asked.fields,
        "image": reference,
        "kind": "cli" if cli is not None else kind,
        "command": options.words("--command", command)
        or ([*facts.entrypoint, *asked.arguments] if asked.arguments else []),
        "working_dir": working_dir,
        "env": {**asked.fields.get("env", {}), **options.pairs("--env", env)},
        "secrets": options.pairs("--secret", secret),
        "header_secrets": options.headers(header_secret),
        "workspace": workspace,
        "egress": granted_egress,
        "scope": scope,
        "start": start,
        "limits": {"memory_mb": memory_mb, "cpus": cpus, "pids": pids, "disk_mb": disk_mb},
        "deadline_s": deadline_s,
        "retry": retry,
        "allow": allow_tool,
        "rename": options.pairs("--rename", rename),
        "override": {own: {"description": text} for own, text in options.pairs("--describe", describe).items()},
    }
    if fields["kind"] == "cli":
        if cli is None:
            fail("an image of kind cli needs --cli, the template of its command line: docs/how-to/cli-images.md")
        fields["commands"] = {called.replace("-", "_"): options.command(cli, stdin, output, description, input_schema)}
    entry = options.entry_of(fields)
    asks = _ungranted(entry, [asked, labelled])
    for one in asks:
        warn(f"not granted: {one}")
    _need_variables(entry, asked)
    seen = _look(settings, called, entry, facts)
    approval, judged = _approval(settings, called, entry, facts, seen)
    if not judged.tools:
        print_judged(judged)
        fail(f"{reference} offers no tool that can be had", FAILED)
    print_judged(judged)
    if (judged.warnings or judged.refused) and not _agreed(yes, f"Add {called} all the same?"):
        fail("it was not added; --yes adds it all the same, without the tools that are refused")
    _store(settings, called, entry.model_dump(exclude_defaults=True), approval, "tool_image_added")
    added = added_image(load_catalog(settings), called)
    names = [tool.name for tool in added.image.tools] if added.image is not None else []
    show(
        as_json,
        {**image_json(added), "not_granted": asks},
        lambda: [f"{called} is added, with {count(len(names), 'tool')}: {', '.join(names)}"],
    )


def approve(
    name: NameArgument,
    pull: Annotated[bool, typer.Option("--pull", help="Fetch the newest image of its reference first.")] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Look at an image again, show what is not as it was approved, and approve it as it is now."""
    from toolserver.catalog.offered import changes, difference

    settings = load_settings(config, state_dir)
    one = added_image(load_catalog(settings), name)
    entry = one.entry
    if entry is None:
        fail(f"{one.reason} Remove it and add it anew: toolserver tools remove {name}")
    facts = image_facts(settings, entry.image, pull=pull)
    seen = _look(settings, name, entry, facts)
    approval, judged = _approval(settings, name, entry, facts, seen)
    earlier = one.row.approval if one.row is not None else None
    listed = [] if earlier is None else earlier.listed
    lines = difference(listed, approval.listed)
    same = earlier is not None and earlier.digest == approval.digest and earlier.reference == approval.reference
    told = {
        "image": name,
        "digest": {"approved": None if earlier is None else earlier.digest, "found": approval.digest},
        "tools": changes(listed, approval.listed),
        "difference": lines,
        "refused": judged.refused,
        "warnings": judged.warnings,
    }
    if same and not lines and one.state == "approved":
        show(as_json, {**told, "approved": True}, lambda: [f"{name} is as it was approved"])
        return
    out = sys.stderr if as_json else sys.stdout
    if earlier is not None and earlier.digest != approval.digest:
        print(f"digest: {earlier.digest}\n     -> {approval.digest}", file=out)
    for line in lines or ["The tools are the same."]:
        print(line, file=out)
    print_judged(judged)
    if not _agreed(yes, f"Approve {name} as it is now?"):
        if as_json:
            show(as_json, {**told, "approved": False}, list)
        fail("it was not approved; --yes approves it without asking", FAILED)
    _store(
        settings,
        name,
        None if one.where == "settings" else entry.model_dump(exclude_defaults=True),
        approval,
        "tool_image_approved",
    )
    show(as_json, {**told, "approved": True}, lambda: [f"{name} is approved, with {count(len(judged.tools), 'tool')}"])


def _asked(image: str | None, file: Path | None, name: str | None) -> Asked:
    from toolserver.catalog.asked import MAX_FILE_BYTES, Asked, DescriptionProblem, read_file

    if (image is None) == (file is None):
        fail("name an image, or a description of one with --from-file")
    if file is None:
        return Asked()
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            fail(f"{file} is larger than {MAX_FILE_BYTES >> 20} MiB")
        return read_file(file.read_text("utf-8"), name)
    except (OSError, UnicodeDecodeError) as problem:
        fail(f"{file} can't be read: {problem}")
    except DescriptionProblem as problem:
        fail(f"{file}: {problem}")


def _look(settings: Settings, name: str, entry: ToolEntry, facts: ImageFacts) -> Introspection | None:
    """What the image offers; None of a command-line image, which offers what its entry says."""
    from toolserver.doctor.trial import introspect, read_secrets

    guarded(lambda: read_secrets(entry))
    if entry.kind == "cli":
        return None
    warn(f"starting {entry.image} to see what it offers")
    return guarded(lambda: introspect(settings, name, entry, facts.digest))


def _approval(
    settings: Settings, name: str, entry: ToolEntry, facts: ImageFacts, seen: Introspection | None
) -> tuple[Approval, Judged]:
    from toolserver.catalog.added import EntryProblem, command_tools
    from toolserver.catalog.offered import Judged, judge, pinned, public_names
    from toolserver.catalog.session_tools import SESSION_TOOLS
    from toolserver.store.tool_images import Approval

    catalog = load_catalog(settings)
    listed = [] if seen is None else pinned(seen.listed)
    if entry.kind == "cli":
        try:
            judged = Judged(command_tools(name, entry)[0])
        except EntryProblem as problem:
            fail(str(problem))
    else:
        judged = judge(name, entry, listed)
    others = [one for one in catalog.added.values() if one.name != name]
    taken = {tool.name for tool in SESSION_TOOLS} | {public for one in others for public in one.names.values()}
    taken |= {tool.name for image in catalog.images.values() if image.origin == "builtin" for tool in image.tools}
    known = {tool.name for tool in judged.tools}
    if strange := sorted(
        (entry.rename.keys() | entry.override.keys() | set(entry.allow or ())) - known - judged.refused.keys()
    ):
        fail(f"the image has no tool {strange[0]!r}; it has {', '.join(sorted(known)) or 'none'}")
    if clash := sorted(set(entry.rename.values()) & taken):
        fail(f"--rename: there is a tool {clash[0]} already")
    earlier = catalog.added[name].names if name in catalog.added else {}
    names = public_names(name, [tool.name for tool in judged.tools], entry.rename, earlier, taken)
    era = None if seen is None else seen.era
    return Approval(entry.image, facts.digest, listed, names, era, time.time()), judged


def _store(settings: Settings, name: str, entry: dict[str, Any] | None, approval: Approval, event: str) -> None:
    from toolserver.catalog.offered import pin
    from toolserver.store import tool_images

    change(
        settings,
        lambda connection: tool_images.put(connection, name, entry, approval),
        lambda _row: (
            event,
            {"image": name, "reference": approval.reference, "digest": approval.digest, "tools": pin(approval.listed)},
        ),
    )


def _need_variables(entry: ToolEntry, asked: Asked) -> None:
    given = entry.secrets.keys() | entry.env.keys()
    lacking = [f"--secret {name}=file:PATH" for name in sorted(asked.required - given)]
    lacking += [f"--env {name}=VALUE" for name in asked.unset if name not in given]
    if lacking:
        fail(f"it does not work without: {' '.join(lacking)}")


def _ungranted(entry: ToolEntry, all_asked: list[Asked]) -> list[str]:
    """What descriptions ask for and the entry does not grant."""
    granted = {
        "workspace": entry.workspace != "none",
        "egress": entry.egress != "none",
        "scope": entry.scope != "session",
    }
    granted["memory-mb"] = entry.limits.memory_mb is not None
    asks = [ask for asked in all_asked for ask in asked.asks if not granted.get(ask.partition(" ")[0], False)]
    for asked in all_asked:
        for name, what in asked.secrets.items():
            if name not in entry.secrets and name not in asked.required:
                asks.append(f"secret {name}{f' ({what})' if what else ''}: give it with --secret {name}=file:PATH")
    from toolserver.catalog.hidden_text import escaped

    return [escaped(ask)[:300] for ask in dict.fromkeys(asks)]


def _agreed(yes: bool, question: str) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        return False
    return typer.confirm(question, default=False, err=True)
