"""Added images as the catalog has them: out of what the operator granted and what was approved, or the reason why not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from toolserver.catalog.cli_template import CliTemplate
from toolserver.catalog.image import LimitsOverride, Tool, ToolImage
from toolserver.catalog.offered import Judged, changes, judge, public_names
from toolserver.catalog.secret import HeaderSecret, SecretSource
from toolserver.catalog.session_tools import SESSION_TOOLS
from toolserver.store.tool_images import ToolImageRow
from toolserver.tool_entry import ToolEntry

_PLACE = re.compile(r"(?<!\{)\{([A-Za-z_][A-Za-z0-9_.-]*)\??\}")


@dataclass(frozen=True)
class AddedImage:
    """An entry and what is known of it. `image` is None while it is withheld, for `reason`. notice: what the operator
    should know of one that is offered. `names` its tools have, or had.

    where: `settings` or `database`. state: `approved`, `new` (nothing was approved yet), `changed`, `refused` or `unusable` (it
    can't be started here now).
    """

    name: str
    entry: ToolEntry | None
    where: str
    row: ToolImageRow | None
    state: str
    image: ToolImage | None = None
    reason: str | None = None
    notice: str | None = None
    judged: Judged = field(default_factory=Judged)

    @property
    def names(self) -> dict[str, str]:
        approval = self.row.approval if self.row is not None else None
        return {} if approval is None else approval.names

    def key(self) -> str:
        """Another one when its sandboxes have to be started anew."""
        if self.image is None or self.entry is None or self.row is None or self.row.approval is None:
            return "withheld"
        approval = self.row.approval
        return json.dumps([self.entry.model_dump(), approval.digest, approval.listed, approval.names], sort_keys=True)


@dataclass(frozen=True)
class Presence:
    """Which added images can't be started here now, and whose names stand for another image than the one that was approved; each
    with a sentence. unusable: why none can.
    """

    unusable: str | None = None
    unfit: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)


class EntryProblem(Exception):  # noqa: N818 - reads as what it names
    """The entry can't be used. The message is a sentence for the operator."""


def load_added(
    rows: Iterable[ToolImageRow],
    settings: Mapping[str, ToolEntry],
    builtin: Iterable[ToolImage],
    presence: Presence,
) -> list[AddedImage]:
    """All of them, those that were added first at the front: a name that two have is the earlier one's."""
    taken = {tool.name for tool in SESSION_TOOLS} | {tool.name for image in builtin for tool in image.tools}
    found: list[AddedImage] = []
    known = list(rows)
    missing = [name for name in sorted(settings) if name not in {row.name for row in known}]
    for row in known:
        if row.entry is None and row.name not in settings:
            continue  # its section was taken out of the settings; what was approved is kept for when it comes back
        one = _added(row.name, settings.get(row.name), row, taken)
        why = presence.unusable or presence.unfit.get(row.name)
        if one.image is not None and why is not None:
            one = replace(one, image=None, state="unusable", reason=why)
        elif one.image is not None:
            one = replace(one, notice=presence.moved.get(row.name))
        taken |= set(one.names.values())
        found.append(one)
    return found + [_added(name, settings[name], None, taken) for name in missing]


def _added(name: str, setting: ToolEntry | None, row: ToolImageRow | None, taken: set[str]) -> AddedImage:
    where = "database" if setting is None else "settings"
    entry = setting
    try:
        if entry is None and row is not None:
            entry = ToolEntry.model_validate(row.entry)
        if entry is None:
            raise EntryProblem("it has no entry")
        approve = f"Look at it and approve it: toolserver tools approve {name}"
        if row is None or row.approval is None:
            return AddedImage(name, entry, where, row, "new", reason=f"The image {name} was never approved. {approve}")
        if row.approval.reference != entry.image:
            reason = f"The image {name} is {entry.image} now, and {row.approval.reference} was approved. {approve}"
            return AddedImage(name, entry, where, row, "changed", reason=reason)
        if row.drift is not None:
            return AddedImage(name, entry, where, row, "changed", reason=drift_reason(name, row))
        image, judged = make_image(name, entry, row, taken)
    except ValidationError as problem:
        reason = f"The entry of the image {name} can't be read: {problem.errors(include_input=False)[0]['msg']}"
        return AddedImage(name, None, where, row, "refused", reason=reason)
    except EntryProblem as problem:
        return AddedImage(name, entry, where, row, "refused", reason=f"The image {name} is refused: {problem}")
    return AddedImage(name, entry, where, row, "approved", image, judged=judged)


def in_engine(rows: Iterable[ToolImageRow], ids: Mapping[str, str]) -> Presence:
    """Out of what the engine has: `ids` of all `references` that it knows."""
    unfit: dict[str, str] = {}
    moved: dict[str, str] = {}
    for row in rows:
        approval = row.approval
        if approval is None:
            continue
        now = ids.get(approval.reference)
        if approval.digest not in ids:
            other = f"; {approval.reference} is {now} there" if now is not None else ""
            unfit[row.name] = (
                f"The engine has the image {row.name} no more as it was approved ({approval.digest}{other}). Load it again, or look "
                f"at what there is and approve it: toolserver tools approve {row.name}"
            )
        elif now is not None and now != approval.digest:
            moved[row.name] = (
                f"{approval.reference} stands for another image now; sessions go on with the one that was approved. To go over to "
                f"it: toolserver tools approve {row.name}"
            )
    return Presence(unfit=unfit, moved=moved)


def references(rows: Iterable[ToolImageRow]) -> list[str]:
    """What `in_engine` has to know the ids of."""
    approvals = [row.approval for row in rows if row.approval is not None]
    return list(dict.fromkeys(name for one in approvals for name in (one.digest, one.reference)))


def drift_reason(name: str, row: ToolImageRow) -> str:
    told = f"The image {name} is not what was approved"
    if row.drift is not None and row.drift.listed is not None and row.approval is not None:
        differ = changes(row.approval.listed, row.drift.listed)
        parts = [
            f"{what} {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" for what, names in differ.items() if names
        ]
        told += f": its tools differ ({'; '.join(parts) or 'their texts'})"
    elif row.drift is not None and row.drift.digest is not None:
        told += ": its digest differs"
    return f"{told}. See the difference and approve it: toolserver tools approve {name}"


def make_image(name: str, entry: ToolEntry, row: ToolImageRow, taken: Iterable[str] = ()) -> tuple[ToolImage, Judged]:
    """Of an entry with an approval. Raises EntryProblem."""
    approval = row.approval
    if approval is None:
        raise EntryProblem("nothing was approved")
    if entry.kind == "cli":
        own, templates = command_tools(name, entry)
        judged = Judged(own)
    else:
        judged, templates = judge(name, entry, approval.listed), {}
    own_names = [tool.name for tool in judged.tools]
    names = public_names(name, own_names, entry.rename, approval.names, set(taken))
    tools = tuple(_offered(tool, names[tool.name], entry) for tool in judged.tools)
    return (
        ToolImage(
            name=name,
            reference=entry.image,
            command=tuple(entry.command),
            workspace=entry.workspace,
            egress=entry.policy,
            start=entry.start,
            env=dict(entry.env),
            limits=LimitsOverride(**entry.limits.model_dump()),
            tools=tools,
            secrets={variable: SecretSource.parse(source) for variable, source in entry.secrets.items()},
            kind=entry.kind,
            origin="added",
            scope=entry.scope,
            digest=approval.digest,
            working_dir=entry.working_dir,
            header_secrets=tuple(
                HeaderSecret(one.host, one.header, SecretSource.parse(one.source), one.prefix)
                for one in entry.header_secrets
            ),
            deadline_s=entry.deadline_s,
            retry=entry.retry,
            era=approval.era,
            cli=templates,
        ),
        judged,
    )


def _offered(tool: Tool, name: str, entry: ToolEntry) -> Tool:
    return replace(tool, name=name, remote_name=None if name == tool.name else tool.name, retry=entry.retry)


def command_tools(image: str, entry: ToolEntry) -> tuple[list[Tool], dict[str, CliTemplate]]:
    """The tools of a command-line image. Raises EntryProblem."""
    tools: list[Tool] = []
    templates: dict[str, CliTemplate] = {}
    for name, command in entry.commands.items():
        try:
            template = CliTemplate.load(command.template())
            schema = command.input_schema or _schema_of(command.argv, command.stdin)
            template.check(schema)
        except ValueError as problem:
            raise EntryProblem(f"command {name}: {problem}") from problem
        judged = judge(image, ToolEntry(image=entry.image), [
            {"name": name, "description": command.description, "inputSchema": schema, "annotations": command.annotations}
        ])  # fmt: skip
        if judged.refused:
            raise EntryProblem(f"command {name}: {next(iter(judged.refused.values()))}")
        tools += judged.tools
        templates[name] = template
    return tools, templates


def _schema_of(argv: list[str | list[str]], stdin: str | None) -> dict[str, Any]:
    """The arguments that a template names, as texts; those outside of a group are required."""
    alone = [text for text in argv if isinstance(text, str)] + ([] if stdin is None else [stdin])
    grouped = [text for group in argv if not isinstance(group, str) for text in group]
    required = list(dict.fromkeys(name for text in alone for name in _PLACE.findall(text)))
    names = dict.fromkeys([*required, *(name for text in grouped for name in _PLACE.findall(text))])
    asked = {
        found[1] for text in (*alone, *grouped) for found in re.finditer(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\?\}", text)
    }
    properties = {name: {"type": "boolean" if name in asked else "string"} for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
