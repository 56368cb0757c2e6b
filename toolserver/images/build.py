"""Build the images that come with Toolcrib: the base, then each on top of it. What is up to date is left alone, without a network."""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from toolserver.images.debian_base import REFERENCE as DEBIAN_REFERENCE
from toolserver.images.debian_base import cache_dir, debian_tarball
from toolserver.images.debs import ASK_STATUS, cached_debs
from toolserver.images.definition import (
    ImageBuildError,
    ImageDefinition,
    base_definition,
    definitions,
)
from toolserver.images.engine import ImageEngine, Progress
from toolserver.images.wheels import cached_wheels

DEFAULT_BASE = "python:3.12-slim"
INPUTS, MADE_FROM = "toolcrib.inputs", "toolcrib.base"
_EPOCH = 1_577_836_800  # one fixed time for all files, so that the same input is the same layer
ASK_PYTHON = "import sys, platform; print('%d.%d' % sys.version_info[:2], platform.machine())"


@dataclass(frozen=True)
class BuiltImage:
    """`action` is what was done; `note` says what the caller should know, such as where the base came from."""

    name: str
    reference: str
    action: Literal["built", "up_to_date"]
    seconds: float
    note: str = ""


def build_images(
    names: Sequence[str] = (),
    *,
    optional: bool = False,
    base: str | None = None,
    docker_host: str | None = None,
    progress: Progress = lambda _: None,
) -> list[BuiltImage]:
    """Build `names` (none: all, the optional ones too where `optional`) and the base they need.

    `base`: an image with Python 3 to stand on. Raises ImageBuildError.
    """
    known = definitions()
    unknown = sorted(set(names) - {*known, "base"})
    if unknown:
        raise ImageBuildError(f"There is no image {', '.join(unknown)}. There are: base, {', '.join(known)}.")
    usual = [name for name, definition in known.items() if optional or not definition.optional]
    wanted = [known[name] for name in (known if names else usual) if not names or name in names]
    with ImageEngine(docker_host) as engine:
        built = [_base(engine, base, progress)]
        built += [_on_base(engine, definition, progress) for definition in wanted]
    return built


def missing_images(docker_host: str | None = None) -> list[str]:
    """Names of the images that the engine does not have in this version, optional ones too.

    Raises ImageBuildError when none answers.
    """
    with ImageEngine(docker_host) as engine:
        return [name for name, definition in definitions().items() if engine.image(definition.tagged) is None]


def outdated_images(docker_host: str | None = None) -> list[str]:
    """Names of the images that the engine has of this version, made of other files than this installation has.

    Raises ImageBuildError when none answers.
    """
    with ImageEngine(docker_host) as engine:
        base = engine.image(base_definition().tagged) or {}
        made_of = engine.labels(base_definition().tagged).get(INPUTS, "")
        base_is_new = not base or made_of == base_definition().digest()
        base_id = str(base.get("Id", "")).removeprefix("sha256:")[:12]
        outdated = []
        for definition in definitions().values():
            inputs = engine.labels(definition.tagged).get(INPUTS)
            wanted = f"{definition.digest()}-{base_id}"
            if inputs is not None and not (base_is_new and inputs.startswith(wanted)):
                outdated.append(definition.name)
    return outdated


def optional_images() -> frozenset[str]:
    """Names of the images that are built only when they are asked for."""
    return frozenset(name for name, definition in definitions().items() if definition.optional)


def _base(engine: ImageEngine, asked: str | None, progress: Progress) -> BuiltImage:
    definition, started = base_definition(), time.monotonic()
    labels = engine.labels(definition.tagged)
    if labels.get(INPUTS) == definition.digest() and asked in (None, labels.get(MADE_FROM)):
        return BuiltImage("base", definition.tagged, "up_to_date", _since(started), f"from {labels.get(MADE_FROM)}")
    reference = _stand_on(engine, asked, progress)
    with _context(definition) as context:
        labels = {INPUTS: definition.digest(), MADE_FROM: reference}
        engine.build(context, definition.tagged, {"BASE": reference}, labels, progress)
    return BuiltImage("base", definition.tagged, "built", _since(started), f"from {reference}")


def _stand_on(engine: ImageEngine, asked: str | None, progress: Progress) -> str:
    """An image that the engine has: the one asked for, else the official Python, else one made of Debian's packages."""
    reference = asked or DEFAULT_BASE
    if engine.image(reference) is not None or engine.pull(reference, progress):
        return reference
    if asked is not None:
        raise ImageBuildError(f"The engine has no image {asked} and can't pull it.")
    progress(f"base: {DEFAULT_BASE} can't be pulled")
    engine.load_root(debian_tarball(progress), DEBIAN_REFERENCE)
    return DEBIAN_REFERENCE


def _on_base(engine: ImageEngine, definition: ImageDefinition, progress: Progress) -> BuiltImage:
    started, base = time.monotonic(), base_definition().tagged
    base_id = (engine.image(base) or {}).get("Id", "")
    inputs = f"{definition.digest()}-{base_id.removeprefix('sha256:')[:12]}"
    if engine.labels(definition.tagged).get(INPUTS) == inputs:
        return BuiltImage(definition.name, definition.tagged, "up_to_date", _since(started))
    wheels = debs = None
    if definition.requirements:
        python, machine = engine.run(base, ASK_PYTHON).split()
        wheels = cached_wheels(definition.requirements, python, machine, cache_dir() / "wheels", progress)
    if definition.debian_packages and engine.labels(base).get(MADE_FROM) == DEBIAN_REFERENCE:
        status = engine.run(base, ASK_STATUS)  # that base was made since the engine reaches no registry
        debs = cached_debs(definition.debian_packages, status, cache_dir() / "debs", progress)
    with _context(definition, wheels, debs) as context:
        engine.build(context, definition.tagged, {"BASE": base}, {INPUTS: inputs}, progress)
    return BuiltImage(definition.name, definition.tagged, "built", _since(started))


@contextmanager
def _context(definition: ImageDefinition, wheels: Path | None = None, debs: Path | None = None) -> Iterator[IO[bytes]]:
    """The build context as a tar, without owner or time of this machine."""
    with tempfile.TemporaryFile() as out:
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, path in definition.files().items():
                _add(tar, name, path.read_bytes())
            for wheel in sorted(wheels.iterdir()) if wheels else ():
                _add(tar, f"wheels/{wheel.name}", wheel.read_bytes())
            if definition.debian_packages:
                _add(tar, "debs/packages.txt", "\n".join(definition.debian_packages).encode())
            for package in sorted(debs.iterdir()) if debs else ():
                _add(tar, f"debs/{package.name}", package.read_bytes())
        out.seek(0)
        yield out


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), _EPOCH, 0o644
    tar.addfile(member, io.BytesIO(content))


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)
