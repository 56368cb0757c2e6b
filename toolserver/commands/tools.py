"""`toolserver tools`: which tool images there are beside the server's own, and what each was granted."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolserver.commands import tool_options as options
from toolserver.commands.changes import change
from toolserver.commands.terminal import (
    FAILED,
    UNREACHABLE,
    ConfigOption,
    JsonOption,
    StateOption,
    fail,
    load_settings,
    show,
    table,
    warn,
)

if TYPE_CHECKING:
    from toolserver.catalog.added import AddedImage
    from toolserver.catalog.asked import Asked
    from toolserver.catalog.catalog import Catalog
    from toolserver.catalog.offered import Judged
    from toolserver.doctor.trial import Introspection
    from toolserver.images.engine import ImageFacts
    from toolserver.settings import Settings
    from toolserver.store.tool_images import Approval
    from toolserver.tool_entry import ToolEntry

app = typer.Typer(
    no_args_is_help=True, help="The tools that sessions can have, and the images that are added for them."
)
NameArgument = Annotated[str, typer.Argument(help="As `tools list` shows it in the column IMAGE.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
_MAX_DESCRIPTION = 110


@app.command("list")
def listing(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """The tools of the catalog, and the images that are not offered."""
    catalog = _catalog(load_settings(config, state_dir))
    found = catalog.tools(None)
    rows = [["NAME", "IMAGE", "DESCRIPTION"]]
    rows += [[tool.name, tool.image, _first_sentence(tool.description)] for tool in found]
    told = {
        "tools": [tool.as_json() for tool in found],
        "images": [_image_json(one) for one in catalog.added.values()],
        "problems": list(catalog.problems),
    }
    show(as_json, told, lambda: table(rows))
    for problem in (*catalog.problems, *(one.reason for one in catalog.withheld() if one.reason)):
        warn(problem)


@app.command("show")
def show_(
    name: NameArgument, config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False
) -> None:
    """One added image: what it was granted, what was approved, its tools."""
    one = _added(_catalog(load_settings(config, state_dir)), name)

    def lines() -> list[str]:
        told = [f"{one.name}: {one.state}, from the {one.where}"]
        told += [f"  {one.reason}"] if one.reason else []
        if one.entry is not None:
            told += [f"  {key}: {value}" for key, value in _granted(one.entry).items()]
        approval = one.row.approval if one.row is not None else None
        if approval is not None:
            told += [f"  digest: {approval.digest}", f"  approved: {_when(approval.at)}"]
        if one.image is not None:
            told += ["  tools:", *(f"    {tool.name}: {_first_sentence(tool.description)}" for tool in one.image.tools)]
        return told + _judged_lines(one.judged)

    show(as_json, _image_json(one), lines)


@app.command("add")
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
    _refuse_reference(reference)
    facts = _facts(settings, reference)
    labelled = of_labels(facts.labels)
    called = name or asked.name or labelled.name or name_of_reference(reference)
    _refuse_name(_catalog(settings), called, plain_name(called))
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
        fields["commands"] = options.command(called.replace("-", "_"), cli, stdin, output, description, input_schema)
    entry = options.entry_of(fields)
    asks = _ungranted(entry, [asked, labelled])
    for one in asks:
        warn(f"not granted: {one}")
    _need_variables(entry, asked)
    seen = _look(settings, called, entry, facts)
    approval, judged = _approval(settings, called, entry, facts, seen)
    if not judged.tools:
        _print_judged(judged)
        fail(f"{reference} offers no tool that can be had", FAILED)
    _print_judged(judged)
    if (judged.warnings or judged.refused) and not _agreed(yes, f"Add {called} all the same?"):
        fail("it was not added; --yes adds it all the same, without the tools that are refused")
    _store(settings, called, entry.model_dump(exclude_defaults=True), approval, "tool_image_added")
    added = _added(_catalog(settings), called)
    names = [tool.name for tool in added.image.tools] if added.image is not None else []
    show(
        as_json,
        {**_image_json(added), "not_granted": asks},
        lambda: [f"{called} is added, with {_count(len(names), 'tool')}: {', '.join(names)}"],
    )


@app.command("approve")
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
    one = _added(_catalog(settings), name)
    entry = one.entry
    if entry is None:
        fail(f"{one.reason} Remove it and add it anew: toolserver tools remove {name}")
    facts = _facts(settings, entry.image, pull=pull)
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
    _print_judged(judged)
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
    show(as_json, {**told, "approved": True}, lambda: [f"{name} is approved, with {_count(len(judged.tools), 'tool')}"])


@app.command("remove")
def remove(
    name: NameArgument, config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False
) -> None:
    """Offer an added image no more. A running server ends its sandboxes within a few seconds."""
    from toolserver.store import tool_images

    settings = load_settings(config, state_dir)
    one = _added(_catalog(settings), name)
    if one.where == "settings":
        fail(f"{name} stands in the settings: take the section [tools.{name}] out of them, and start the server anew")
    change(
        settings,
        lambda connection: tool_images.remove(connection, name),
        lambda gone: ("tool_image_removed", {"image": name}) if gone else None,
    )
    show(as_json, {"image": name, "removed": True}, lambda: [f"{name} is removed"])


@app.command("check")
def check(
    image: Annotated[str, typer.Argument(help="The engine's name of an image, or the name of an added one.")],
    kind: options.KindOption = "mcp",
    command: options.CommandOption = None,
    working_dir: options.WorkingDirOption = None,
    env: options.EnvOption = None,
    secret: options.SecretOption = None,
    workspace: options.WorkspaceOption = "none",
    memory_mb: options.MemoryOption = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try an image under full hardening and tell what it does well and badly. Exit code 1 when something fails."""
    from toolserver.catalog.asked import name_of_reference
    from toolserver.doctor.image_check import check_image

    settings = load_settings(config, state_dir)
    added = _catalog(settings).added.get(image)
    if added is not None and added.entry is not None:
        name, entry = image, added.entry
    else:
        _refuse_reference(image)
        name = name_of_reference(image)
        fields: dict[str, Any] = {
            "image": image,
            "command": options.words("--command", command),
            "working_dir": working_dir,
            "env": options.pairs("--env", env),
            "secrets": options.pairs("--secret", secret),
            "workspace": workspace,
            "limits": {"memory_mb": memory_mb},
        }
        if kind == "cli":
            fields |= {"kind": "cli", "commands": {"run": {"description": "A command.", "argv": []}}}
        entry = options.entry_of(fields)
    facts = _facts(settings, entry.image)
    approval = added.row.approval if added is not None and added.row is not None else None
    report = _guarded(lambda: check_image(settings, name, entry, facts, approval))
    counts = {state: sum(1 for one in report if one.state == state) for state in ("pass", "warn", "fail")}
    told = {"image": entry.image, "digest": facts.digest, "checks": [one.as_json() for one in report], **counts}

    def lines() -> list[str]:
        rows = table([[one.state, one.name, one.found] for one in report])
        advice = [f"{one.state}: {one.name}: {one.advice}" for one in report if one.state != "pass" and one.advice]
        return [*rows, "", *advice, f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail"]

    show(as_json, told, lines)
    if counts["fail"]:
        raise typer.Exit(FAILED)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What the image will be called: small letters, digits and '-'.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder to make; by default one of that name, here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a folder with a tool image in Python that works: a server, a Dockerfile, a test, a README."""
    from toolserver.images.scaffold import ScaffoldProblem, scaffold

    place = folder or Path(name)
    try:
        files = scaffold(name, place)
    except ScaffoldProblem as problem:
        fail(str(problem))
    steps = [f"docker build -t {name} {place}", f"toolserver tools check {name}", f"toolserver tools add {name}"]
    show(
        as_json,
        {"name": name, "folder": str(place), "files": files, "next": steps},
        lambda: [*(f"made {place / file}" for file in files), "", "Then:", *(f"  {step}" for step in steps)],
    )


# -- what they share


def _catalog(settings: Settings) -> Catalog:
    from toolserver.doctor.known_catalog import known_catalog
    from toolserver.errors import StartRefused, StoreUnavailable

    try:
        return known_catalog(settings)
    except (StartRefused, StoreUnavailable) as problem:
        fail(str(problem))


def _added(catalog: Catalog, name: str) -> AddedImage:
    if (one := catalog.added.get(name)) is not None:
        return one
    if name in catalog.images or name in catalog.absent:
        fail(f"{name} comes with the server: it is neither approved nor removed")
    known = ", ".join(catalog.added) or "none yet"
    fail(f"there is no added image {name[:60]!r}; there are: {known}")


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


def _refuse_reference(reference: str) -> None:
    import re

    from toolserver.tool_entry import REFERENCE

    if re.fullmatch(REFERENCE, reference) is None or len(reference) > 255:
        fail(f"{reference[:80]!r} is no name of an image")


def _refuse_name(catalog: Catalog, name: str, plain: str) -> None:
    import re

    from toolserver.tool_entry import NAME, RESERVED

    if re.fullmatch(NAME, name) is None:
        fail(f"{name[:60]!r} is no name for an image: small letters, digits and '-'; for example --name {plain}")
    if name in RESERVED or (name in catalog.images and name not in catalog.added):
        fail(f"{name} is one of the server's own images; choose another name with --name")
    if name in catalog.added:
        fail(f"there is an image {name} already; choose another name with --name, or: toolserver tools remove {name}")


def _facts(settings: Settings, reference: str, *, pull: bool = False) -> ImageFacts:
    from toolserver.doctor.trial import ImageMissing, describe
    from toolserver.images.definition import ImageBuildError
    from toolserver.images.engine import ImageEngine

    try:
        if pull:
            with ImageEngine(settings.runtime.docker_host) as engine:
                engine.pull(reference, warn)
        return describe(settings, reference, warn)
    except (ImageMissing, ImageBuildError) as problem:
        fail(str(problem), UNREACHABLE)


def _guarded(work: Any) -> Any:
    """Ends the command with what stood in the way of a trial."""
    from toolserver.catalog.secret import SecretMissing
    from toolserver.errors import ImageUnusable, RuntimeUnavailable

    try:
        return work()
    except SecretMissing as problem:
        fail(str(problem))
    except ImageUnusable as problem:
        fail(str(problem), FAILED)
    except RuntimeUnavailable as problem:
        fail(str(problem), UNREACHABLE)


def _look(settings: Settings, name: str, entry: ToolEntry, facts: ImageFacts) -> Introspection | None:
    """What the image offers; None of a command-line image, which offers what its entry says."""
    from toolserver.doctor.trial import introspect, read_secrets

    _guarded(lambda: read_secrets(entry))
    if entry.kind == "cli":
        return None
    seen: Introspection = _guarded(lambda: introspect(settings, name, entry, facts.digest))
    return seen


def _approval(
    settings: Settings, name: str, entry: ToolEntry, facts: ImageFacts, seen: Introspection | None
) -> tuple[Approval, Judged]:
    from toolserver.catalog.added import EntryProblem, command_tools
    from toolserver.catalog.offered import Judged, judge, pinned, public_names
    from toolserver.catalog.session_tools import SESSION_TOOLS
    from toolserver.store.tool_images import Approval

    catalog = _catalog(settings)
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


def _judged_lines(judged: Judged) -> list[str]:
    from toolserver.catalog.hidden_text import escaped

    told = [f"refused: {escaped(name)}: {why}" for name, why in judged.refused.items()]
    return told + [f"warning: {escaped(name)}: {'; '.join(whys)}" for name, whys in judged.warnings.items()]


def _print_judged(judged: Judged) -> None:
    for line in _judged_lines(judged):
        warn(line)


def _granted(entry: ToolEntry) -> dict[str, Any]:
    return {key: value for key, value in entry.model_dump(exclude_defaults=True).items() if key != "commands"}


def _image_json(one: AddedImage) -> dict[str, Any]:
    approval = one.row.approval if one.row is not None else None
    return {
        "image": one.name,
        "state": one.state,
        "reason": one.reason,
        "where": one.where,
        "entry": None if one.entry is None else one.entry.model_dump(exclude_defaults=True),
        "digest": None if approval is None else approval.digest,
        "approved_at": None if approval is None else _when(approval.at),
        "era": None if approval is None else approval.era,
        "tools": [] if one.image is None else [tool.name for tool in one.image.tools],
        "refused": one.judged.refused,
        "warnings": one.judged.warnings,
    }


def _when(at: float) -> str:
    from toolserver.sessions.session import iso_time

    return iso_time(at)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _first_sentence(text: str) -> str:
    sentence = text.strip().splitlines()[0].split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _MAX_DESCRIPTION else sentence[:_MAX_DESCRIPTION].rsplit(" ", 1)[0] + " …"
