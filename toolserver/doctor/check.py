"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "weaker", "problem"]


@dataclass(frozen=True)
class Check:
    """`state`: as it should be, holding less than it could, or in the way of starting sandboxes. `advice`: what to do, empty for ok."""

    name: str
    state: State
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def check(name: str, found: str, wrong: str = "", *, problem: bool = False) -> Check:
    """`wrong`: the advice when something is; empty when all is well."""
    return Check(name, ("problem" if problem else "weaker") if wrong else "ok", found, wrong)
