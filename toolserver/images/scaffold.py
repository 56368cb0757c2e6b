"""`toolserver tools new`: a tool image in Python to begin with, which passes `tools check` as it is."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from toolserver.images.definition import base_definition
from toolserver.tool_entry import NAME, RESERVED

_FILES = ("server.py", "tools.py", "Dockerfile", "README.md", "test_server.py")


class ScaffoldProblem(Exception):  # noqa: N818 - reads as what it names
    """The folder can't be made. The message is a sentence for whoever asked for it."""


def scaffold(name: str, place: Path) -> list[str]:
    """Make the folder `place`; the names of its files. Raises ScaffoldProblem: then nothing was made."""
    if re.fullmatch(NAME, name) is None or name in RESERVED:
        raise ScaffoldProblem(
            f"{name[:60]!r} is no name for a tool image: small letters, digits and '-', not one of the server's own"
        )
    templates = files("toolserver.images") / "template"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise ScaffoldProblem(f"{place} is not empty; choose another folder with --dir")
        for file in _FILES:
            text = (templates / f"{file}.txt").read_text("utf-8")
            text = text.replace("@NAME@", name).replace("@BASE@", base_definition().tagged)
            (place / file).write_text(text, "utf-8")
    except OSError as problem:
        raise ScaffoldProblem(f"{place} can't be written: {problem.strerror}") from problem
    return list(_FILES)
