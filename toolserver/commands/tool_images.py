"""What the commands of `tools` share: the catalog without a server, the engine's word on an image, and how both are told."""

# ruff: noqa: PLC0415 - imports wait for their command
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from toolserver.commands.terminal import FAILED, UNREACHABLE, fail, warn

if TYPE_CHECKING:
    from toolserver.catalog.added import AddedImage
    from toolserver.catalog.catalog import Catalog
    from toolserver.catalog.offered import Judged
    from toolserver.images.engine import ImageFacts
    from toolserver.settings import Settings

T = TypeVar("T")
NameArgument = Annotated[str, typer.Argument(help="As `tools list` shows it in the column IMAGE.")]
_MAX_DESCRIPTION = 110


def load_catalog(settings: Settings) -> Catalog:
    from toolserver.doctor.known_catalog import known_catalog
    from toolserver.errors import StartRefused, StoreUnavailable

    try:
        return known_catalog(settings)
    except (StartRefused, StoreUnavailable) as problem:
        fail(str(problem))


def added_image(catalog: Catalog, name: str) -> AddedImage:
    if name not in catalog.added:
        if name in catalog.images or name in catalog.absent:
            fail(f"{name} comes with the server: it is neither approved nor removed")
        known = ", ".join(catalog.added) or "none yet"
        fail(f"there is no added image {name[:60]!r}; there are: {known}")
    return catalog.added[name]


def refuse_reference(reference: str) -> None:
    import re

    from toolserver.tool_entry import REFERENCE

    if re.fullmatch(REFERENCE, reference) is None or len(reference) > 255:
        fail(f"{reference[:80]!r} is no name of an image")


def refuse_name(catalog: Catalog, name: str, plain: str) -> None:
    import re

    from toolserver.tool_entry import NAME, RESERVED

    if re.fullmatch(NAME, name) is None:
        fail(f"{name[:60]!r} is no name for an image: small letters, digits and '-'; for example --name {plain}")
    if name in RESERVED or (name in catalog.images and name not in catalog.added):
        fail(f"{name} is one of the server's own images; choose another name with --name")
    if name in catalog.added:
        fail(f"there is an image {name} already; choose another name with --name, or: toolserver tools remove {name}")


def image_facts(settings: Settings, reference: str, *, pull: bool = False) -> ImageFacts:
    from toolserver.doctor.trial import ImageMissing, describe
    from toolserver.images.definition import ImageBuildError
    from toolserver.images.engine import ImageEngine

    try:
        if pull:
            with ImageEngine(settings.runtime.docker_host) as engine:
                if not engine.pull(reference, warn):
                    fail(
                        f"{reference} could not be fetched, so nothing was compared or approved; leave --pull out for the one here",
                        UNREACHABLE,
                    )
        return describe(settings, reference, warn)
    except (ImageMissing, ImageBuildError) as problem:
        fail(str(problem), UNREACHABLE)


def guarded(work: Callable[[], T]) -> T:
    """Ends the command with what stood in the way of a trial."""
    from toolserver.catalog.hidden_text import escaped
    from toolserver.catalog.secret import SecretMissing
    from toolserver.errors import ImageUnusable, RuntimeUnavailable

    try:
        return work()
    except SecretMissing as problem:
        fail(str(problem))
    except ImageUnusable as problem:
        for line in problem.said.splitlines()[-10:]:
            warn(f"it said: {escaped(line)[:300]}")
        fail(f"{problem} Is it a command-line program, and no MCP server? Then: --kind cli", FAILED)
    except RuntimeUnavailable as problem:
        fail(str(problem), UNREACHABLE)


def judged_lines(judged: Judged) -> list[str]:
    from toolserver.catalog.hidden_text import escaped

    told = [f"refused: {escaped(name)}: {why}" for name, why in judged.refused.items()]
    return told + [f"warning: {escaped(name)}: {'; '.join(whys)}" for name, whys in judged.warnings.items()]


def print_judged(judged: Judged) -> None:
    for line in judged_lines(judged):
        warn(line)


def image_json(one: AddedImage) -> dict[str, Any]:
    approval = one.row.approval if one.row is not None else None
    return {
        "image": one.name,
        "state": one.state,
        "reason": one.reason,
        "notice": one.notice,
        "where": one.where,
        "entry": None if one.entry is None else one.entry.model_dump(exclude_defaults=True),
        "digest": None if approval is None else approval.digest,
        "approved_at": None if approval is None else when(approval.at),
        "era": None if approval is None else approval.era,
        "tools": [] if one.image is None else [tool.name for tool in one.image.tools],
        "refused": one.judged.refused,
        "warnings": one.judged.warnings,
    }


def when(at: float) -> str:
    from toolserver.sessions.session import iso_time

    return iso_time(at)


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def first_sentence(text: str) -> str:
    sentence = text.strip().splitlines()[0].split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= _MAX_DESCRIPTION else sentence[:_MAX_DESCRIPTION].rsplit(" ", 1)[0] + " …"
