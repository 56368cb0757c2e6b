"""The script of a scripted model: a TOML or JSON file with rules, first match wins. Format: docs/reference/mock-scripts.md.

What a rule answers depends on the request alone (its role, texts, tools and number of assistant messages), so a server that
was restarted goes on with the same answers. Only `occurrence` and a quirk's `sends` count in memory.
"""

from __future__ import annotations

import json
import re
import threading
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.functional_validators import AfterValidator, BeforeValidator

from agent.llm.mock_distortions import DISTORTIONS
from agent.llm.mock_faults import DAMAGES, REFUSALS
from agent.llm.mock_quirks import Quirk
from agent.llm.mock_reply import Call, Planned
from agent.llm.mock_request import Asked, ScriptProblem, render


class ScriptInvalid(Exception):  # noqa: N818
    """The script file can't be read, or is against the format. The message names the place."""


def _checked_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"no regular expression: {error}") from error
    return text


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _known_quirks(quirks: list[Quirk]) -> list[Quirk]:
    known = {*REFUSALS, *DISTORTIONS, *DAMAGES}
    for quirk in quirks:
        if quirk.name not in known:
            raise ValueError(f"no quirk {quirk.name!r}; known: {', '.join(sorted(known))}")
    return quirks


def _named(value: Any) -> Any:
    """A quirk that needs nothing is written as its name alone."""
    return [{"name": item} if isinstance(item, str) else item for item in _as_list(value)]


Pattern = Annotated[str, AfterValidator(_checked_pattern)]
Strings = Annotated[list[str], BeforeValidator(_as_list)]
Numbers = Annotated[list[int], BeforeValidator(_as_list)]
Quirks = Annotated[list[Quirk], BeforeValidator(_named), AfterValidator(_known_quirks)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ScriptedCall(_Record):
    """`arguments_text` instead of `arguments`: sent as it stands, JSON or not."""

    name: str
    arguments: dict[str, Any] = {}
    arguments_text: str | None = None
    id: str | None = None


class ScriptedReply(_Record):
    """`finish_reason` None: tool_calls with calls, else stop. `usage` None: counted."""

    text: str = ""
    reasoning: str = ""
    call: list[ScriptedCall] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class Rule(_Record):
    """When all conditions hold, reply number `turn - from_turn` is given. Patterns are searched, not matched whole."""

    name: str
    role: Strings = []
    system: Pattern | None = None
    goal: Pattern | None = None  # in any user message
    last: Pattern | None = None  # in the last message
    tool: Pattern | None = None  # in the newest tool result
    any: Pattern | None = None  # in any message
    tools: Strings = []  # all of them are offered
    turn: Numbers = []  # the number of assistant messages is one of these
    occurrence: Numbers = []  # which different request it is, of those that meet the rule's other conditions; 1 is the first
    from_turn: int = 0
    on_exhausted: Literal["error", "repeat"] = "error"
    quirks: Quirks = []
    reply: list[ScriptedReply] = []

    @model_validator(mode="after")
    def _answers_something(self) -> Rule:
        if not self.reply and not self.quirks:
            raise ValueError(f"rule {self.name!r} has neither a reply nor a quirk")
        return self

    def matches(self, asked: Asked) -> bool:
        """All conditions but `occurrence`."""
        newest = asked.texts("tool")[:1]
        return (
            (not self.role or asked.role in self.role)
            and (not self.turn or asked.turn in self.turn)
            and set(self.tools) <= set(asked.tool_names)
            and _found(self.system, asked.texts("system"))
            and _found(self.goal, asked.texts("user"))
            and _found(self.last, asked.texts("last"))
            and _found(self.tool, newest)
            and _found(self.any, asked.texts("any"))
        )


class Script(_Record):
    """`quirks` hold for every rule."""

    version: Literal[1] = 1
    model: str = "scripted"
    quirks: Quirks = []
    rule: list[Rule] = Field(min_length=1)

    def choose(self, asked: Asked, memory: Memory) -> tuple[Rule, Planned]:
        """The rule that answers, and its reply with templates filled in. Raises ScriptProblem."""
        for rule in self.rule:
            if rule.matches(asked) and (not rule.occurrence or memory.occurrence(rule, asked) in rule.occurrence):
                return rule, self._plan(rule, asked)
        roles = sorted({role for rule in self.rule for role in rule.role})
        raise ScriptProblem(f"no rule matches (the script knows the roles {roles}). Asked: {asked.describe()}")

    def _plan(self, rule: Rule, asked: Asked) -> Planned:
        if not rule.reply:
            return Planned()
        number = max(asked.turn - rule.from_turn, 0)
        if number >= len(rule.reply):
            if rule.on_exhausted == "error":
                raise ScriptProblem(
                    f"rule {rule.name!r} has {len(rule.reply)} replies and was asked for number {number + 1}: write another "
                    f'[[rule.reply]], or set on_exhausted = "repeat". Asked: {asked.describe()}'
                )
            number = len(rule.reply) - 1
        reply = rule.reply[number]
        calls = [
            Call(
                render(call.name, asked),
                json.dumps(render(call.arguments, asked), ensure_ascii=False)
                if call.arguments_text is None
                else render(call.arguments_text, asked),
                call.id or f"call_{asked.fingerprint[:12]}_{position}",
            )
            for position, call in enumerate(reply.call)
        ]
        return Planned(
            render(reply.text, asked), calls, reply.finish_reason, render(reply.reasoning, asked), reply.usage
        )


class Memory:
    """What a running server remembers: which requests it saw. Sending one again is no new occurrence."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, dict[str, int]] = {}
        self._sends: dict[tuple[str, str], int] = {}

    def occurrence(self, rule: Rule, asked: Asked) -> int:
        with self._lock:
            seen = self._seen.setdefault(rule.name, {})
            return seen.setdefault(asked.fingerprint, len(seen) + 1)

    def sends(self, quirk: str, asked: Asked) -> int:
        """How often this very request came to this quirk, this time included."""
        with self._lock:
            key = (quirk, asked.fingerprint)
            self._sends[key] = self._sends.get(key, 0) + 1
            return self._sends[key]


def load_script(path: Path) -> Script:
    """Raises ScriptInvalid."""
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ScriptInvalid(f"the script {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ScriptInvalid(f"the script {path} is no valid {path.suffix.lstrip('.') or 'TOML'}: {error}") from error
    return parse_script(data, str(path))


def parse_script(data: Any, source: str = "script") -> Script:
    """Raises ScriptInvalid."""
    try:
        return Script.model_validate(data)
    except ValidationError as error:
        places = (f"{'.'.join(str(part) for part in e['loc']) or 'script'}: {e['msg']}" for e in error.errors())
        raise ScriptInvalid(
            f"{source} is against the format:\n" + "\n".join(f"- {place}" for place in places)
        ) from error


def _found(pattern: str | None, texts: list[str]) -> bool:
    return pattern is None or any(re.search(pattern, text) for text in texts)
