"""From the arguments of a call to a command line: one element of the template becomes one element of argv, never shell text.

`{name}` stands for an argument, `{{` and `}}` for braces. An element that is nothing but `{name}` of a list becomes one
element for each of its values. `{name?}` becomes nothing and asks that the argument is there and not false. A list within
the template is a group: it is left out whole when an argument in it is not there.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

WORKSPACE = "/workspace"
MAX_ELEMENT_BYTES, MAX_ARGV_BYTES = 100_000, 1_000_000
CommandEnd = Literal["done", "failed", "invalid"]
_PART = re.compile(r"\{\{|\}\}|\{(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)(?P<asked>\?)?\}|[{}]")
_KNOWN = ("argv", "stdin", "output", "stderr", "exit_codes", "files", "allow_dash")

Element = str | tuple[str, ...]


class Unfit(Exception):  # noqa: N818 - reads as the state it names
    """Arguments that make no command line; `errors` as invalid_arguments tells them: [{"pointer", "message"}]."""

    def __init__(self, errors: list[dict[str, str]]) -> None:
        super().__init__("; ".join(error["message"] for error in errors))
        self.errors = errors


@dataclass(frozen=True)
class CommandLine:
    """`argv` follows the image's entrypoint; `stdin` is all of its input."""

    argv: tuple[str, ...]
    stdin: bytes


@dataclass(frozen=True)
class CliTemplate:
    """How a tool of a command-line image is run.

    argv: what follows the image's entrypoint, or the entry's command. stdin: a template of the input; None: empty. output:
    what stdout is. stderr: shown when the tool failed, or always. exit_codes: how the call ends by exit code; else 0 is `done`
    and all others `failed`. files: arguments that are paths in the workspace, whose place in the sandbox the command gets.
    allow_dash: arguments whose value may begin with `-` where it could be taken for an option.
    """

    argv: tuple[Element, ...]
    stdin: str | None = None
    output: Literal["text", "json"] = "text"
    stderr: Literal["failed", "always"] = "failed"
    exit_codes: Mapping[int, CommandEnd] = field(default_factory=dict)
    files: frozenset[str] = frozenset()
    allow_dash: frozenset[str] = frozenset()

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> CliTemplate:
        """Of a table of the settings or the store. Raises ValueError with a sentence for the operator."""
        if unknown := sorted(set(told) - set(_KNOWN)):
            raise ValueError(f"cli has no key {', '.join(unknown)}; it has {', '.join(_KNOWN)}")
        stdin = told.get("stdin")
        if stdin is not None and not isinstance(stdin, str):
            raise ValueError("cli.stdin must be a text")
        made = cls(
            argv=_elements(told.get("argv")),
            stdin=stdin,
            output=_one_of("output", told.get("output", "text"), ("text", "json")),
            stderr=_one_of("stderr", told.get("stderr", "failed"), ("failed", "always")),
            exit_codes=_exit_codes(told.get("exit_codes", {})),
            files=_names("files", told.get("files", [])),
            allow_dash=_names("allow_dash", told.get("allow_dash", [])),
        )
        for text in made._texts():
            _parts(text)
        return made

    def as_json(self) -> dict[str, Any]:
        """As `load` takes it."""
        told = {**asdict(self), "argv": [one if isinstance(one, str) else list(one) for one in self.argv]}
        codes = {str(code): end for code, end in self.exit_codes.items()}
        told |= {"files": sorted(self.files), "allow_dash": sorted(self.allow_dash), "exit_codes": codes}
        return told

    def check(self, input_schema: Mapping[str, Any]) -> None:
        """That it can be filled from arguments of this schema. Raises ValueError with a sentence for the operator."""
        properties = input_schema.get("properties") or {}
        always = {name for name, about in properties.items() if isinstance(about, dict) and "default" in about}
        always.update(input_schema.get("required") or [])
        used: set[str] = set()
        for element in (*self.argv, *([] if self.stdin is None else [self.stdin])):
            grouped = not isinstance(element, str)
            for text in [element] if isinstance(element, str) else element:
                names = _names_in(text)
                used |= names
                if not grouped and (loose := sorted(names - always)):
                    raise ValueError(
                        f"cli uses {{{loose[0]}}} outside of a group, but the argument may be missing: require it, give "
                        "it a default, or put the element into a list of its own"
                    )
        for told in (used, self.files, self.allow_dash):
            if missing := sorted(told - set(properties)):
                raise ValueError(f"cli names the argument {missing[0]}, which input_schema does not have")

    def expand(self, arguments: Mapping[str, Any], input_schema: Mapping[str, Any]) -> CommandLine:
        """Of arguments that fit the schema. Raises Unfit."""
        properties = input_schema.get("properties") or {}
        defaults = {
            n: about["default"] for n, about in properties.items() if isinstance(about, dict) and "default" in about
        }
        values = _Values({**defaults, **{n: v for n, v in arguments.items() if v is not None}}, self)
        for element in self.argv:
            if isinstance(element, str):
                values.add(element)
            elif all(values.has(name, asked=asked) for text in element for name, asked in _asked_in(text)):
                for text in element:
                    values.add(text)
        stdin = "" if self.stdin is None else values.text(self.stdin)
        values.check()
        return CommandLine(tuple(values.argv), stdin.encode("utf-8", "replace"))

    def end_of(self, exit_code: int) -> CommandEnd:
        return self.exit_codes.get(exit_code, "done" if exit_code == 0 else "failed")

    def _texts(self) -> list[str]:
        argv = [text for one in self.argv for text in ([one] if isinstance(one, str) else one)]
        return argv if self.stdin is None else [*argv, self.stdin]


class _Values:
    """The arguments of one call, and the command line that they make."""

    def __init__(self, values: Mapping[str, Any], template: CliTemplate) -> None:
        self._values, self._template = values, template
        self.argv: list[str] = []
        self._errors: dict[str, str] = {}
        self._after_dashes = False

    def has(self, name: str, *, asked: bool) -> bool:
        value = self._values.get(name)
        return value is not None and value != [] and not (asked and value is False)

    def add(self, text: str) -> None:
        """The elements that an element of the template becomes."""
        parts = _parts(text)
        kept = [part for part in parts if not isinstance(part, _Place) or not part.asked]
        if len(kept) < len(parts) and not any(part for part in kept):
            return  # it was there to be asked for alone
        if len(kept) == 1 and isinstance(place := kept[0], _Place):
            value = self._values.get(place.name)
            for one in value if isinstance(value, list) else [value]:
                self._add_value(place.name, self._shown(place.name, one))
            return
        self._after_dashes = self._after_dashes or text == "--"
        whole = self.text(text)
        first = kept[0]
        if whole.startswith("-") and isinstance(first, _Place):
            self._refuse_dash(first.name)
        self.argv.append(whole)

    def _add_value(self, name: str, value: str) -> None:
        if value.startswith("-"):
            self._refuse_dash(name)
        self.argv.append(value)

    def _refuse_dash(self, name: str) -> None:
        if not self._after_dashes and name not in self._template.allow_dash:
            self._refuse(name, "must not begin with '-': the command would take it for an option")

    def text(self, text: str) -> str:
        return "".join(
            part if isinstance(part, str) else "" if part.asked else self._shown(part.name, self._values.get(part.name))
            for part in _parts(text)
        )

    def _shown(self, name: str, value: Any) -> str:
        shown = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
        if "\0" in shown:
            self._refuse(name, "must not hold NUL")
        return self._place_of(name, shown) if name in self._template.files else shown

    def _place_of(self, name: str, path: str) -> str:
        whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
        if not path or (whole != WORKSPACE and not whole.startswith(WORKSPACE + "/")):
            self._refuse(name, "must be a path in the workspace")
        return whole

    def _refuse(self, name: str, why: str) -> None:
        self._errors.setdefault(name, why)

    def check(self) -> None:
        """Raises Unfit with all errors at once."""
        sizes = [len(one.encode("utf-8", "replace")) for one in self.argv]
        errors = [
            {"pointer": f"/{name.replace('~', '~0').replace('/', '~1')}", "message": why}
            for name, why in self._errors.items()
        ]
        if max(sizes, default=0) > MAX_ELEMENT_BYTES or sum(sizes) > MAX_ARGV_BYTES:
            errors.append(
                {
                    "pointer": "",
                    "message": f"is too long for a command line of {MAX_ARGV_BYTES} bytes, {MAX_ELEMENT_BYTES} a value",
                }
            )
        if errors:
            raise Unfit(errors)


@dataclass(frozen=True)
class _Place:
    name: str
    asked: bool


def _parts(text: str) -> list[str | _Place]:
    """Raises ValueError for a brace that is none of the forms."""
    parts: list[str | _Place] = []
    end = 0
    for found in _PART.finditer(text):
        if found.start() > end:
            parts.append(text[end : found.start()])
        end = found.end()
        if (name := found["name"]) is not None:
            parts.append(_Place(name, found["asked"] is not None))
        elif found[0] in ("{{", "}}"):
            parts.append(found[0][0])
        else:
            raise ValueError(f"cli has a lone {found[0]} in {text!r}: write {found[0] * 2} for the character itself")
    if end < len(text):
        parts.append(text[end:])
    return parts


def _asked_in(text: str) -> list[tuple[str, bool]]:
    return [(part.name, part.asked) for part in _parts(text) if isinstance(part, _Place)]


def _names_in(text: str) -> set[str]:
    return {name for name, _ in _asked_in(text)}


def _elements(told: Any) -> tuple[Element, ...]:
    made: list[Element] = []
    for one in told if isinstance(told, list | tuple) else [None]:
        if isinstance(one, str):
            made.append(one)
        elif isinstance(one, list | tuple) and one and all(isinstance(text, str) for text in one):
            made.append(tuple(one))
        else:
            raise ValueError("cli.argv must be a list of texts, and of lists of texts for groups")
    if any("\0" in text for one in made for text in ([one] if isinstance(one, str) else one)):
        raise ValueError("cli.argv must not hold NUL")
    return tuple(made)


def _one_of(name: str, told: Any, known: tuple[str, ...]) -> Any:
    if told not in known:
        raise ValueError(f"cli.{name} must be one of {', '.join(known)}")
    return told


def _names(name: str, told: Any) -> frozenset[str]:
    if not isinstance(told, list | tuple | frozenset | set) or not all(isinstance(one, str) for one in told):
        raise ValueError(f"cli.{name} must be a list of arguments' names")
    return frozenset(told)


def _exit_codes(told: Any) -> dict[int, CommandEnd]:
    ends: dict[int, CommandEnd] = {}
    for code, end in told.items() if isinstance(told, Mapping) else [("", "")]:
        number = int(code) if str(code).isdecimal() else -1
        if not 0 <= number <= 255 or end not in get_args(CommandEnd):
            raise ValueError(f"cli.exit_codes must map codes from 0 to 255 to one of {', '.join(get_args(CommandEnd))}")
        ends[number] = cast(CommandEnd, end)
    return ends
