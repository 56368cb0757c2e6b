"""Is an attempt getting anywhere? Counts what leads nowhere, and says when the model must submit.

A call with the same arguments and the same result as before is answered with a remark, then not run any more, and asked
for once more it ends the attempt's freedom: only subtask_submit is left. A result never seen before starts the count anew,
so a test run again after each repair, or a job polled while it moves, is not stopped. A tool that fails in the same words
again, with other arguments, is nothing new either. All counts follow from the journalled
replies and outcomes, so a resumed attempt has the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field

from agent.store.hash_chain import canonical
from agent.tools.outcome import Outcome, OutcomeKind

MAX_REPEATS = 2  # runs beyond the first of one call with one result
MAX_FRUITLESS = 3  # replies in a row
MAX_UNKNOWN_TOOLS = 3  # an attempt
MAX_INVALID_CALLS = 5  # an attempt
MAX_FORCED = 2  # tries when nothing but subtask_submit is offered

_FAILURES = frozenset({OutcomeKind.FAILED, OutcomeKind.TIMEOUT, OutcomeKind.DENIED})

# replies without a usable call that don't cost a step; together EXTRA_ACTOR_CALLS of agent.budget
ALLOWANCES = {"text": 2, "empty": 2, "cut": 2, "broken": 2, "overflow": 1}


def canonical_arguments(text: str) -> str:
    """One text for arguments that mean the same; what is no JSON stays as it is."""
    try:
        return canonical(json.loads(text))
    except (ValueError, RecursionError):
        return text


@dataclass
class Progress:
    must_submit: bool = False
    _left: dict[str, int] = field(default_factory=lambda: dict(ALLOWANCES))
    _fruitless: int = 0
    _forced: int = 0
    _unknown: int = 0
    _invalid: int = 0
    _seen: set[str] = field(default_factory=set)
    _repeats: Counter[str] = field(default_factory=Counter)
    _withheld: set[str] = field(default_factory=set)
    _failures: set[str] = field(default_factory=set)

    def spend(self, kind: str) -> bool:
        """True while the allowance of this kind of useless reply lasts; afterwards such a reply costs a step."""
        left = self._left[kind]
        self._left[kind] = max(0, left - 1)
        return left > 0

    def fruitless(self) -> None:
        """One reply that brought nothing new."""
        self._fruitless += 1
        self.must_submit = self.must_submit or self._fruitless >= MAX_FRUITLESS

    def fruitful(self) -> None:
        self._fruitless = 0

    def forced(self) -> bool:
        """One more request with nothing but subtask_submit; False when there were enough."""
        self._forced += 1
        return self._forced <= MAX_FORCED

    def withholds(self, tool: str, arguments: str) -> bool:
        """Whether this very call is no longer run. Asking for it anyway means that the model must submit."""
        if _call(tool, arguments) not in self._withheld:
            return False
        self.must_submit = True
        return True

    def saw(self, arguments: str, outcome: Outcome) -> tuple[bool, str]:
        """Whether the outcome is new, and a remark for the model when it is not."""
        if outcome.kind is OutcomeKind.UNKNOWN_TOOL:
            self._unknown += 1
            self.must_submit = self.must_submit or self._unknown > MAX_UNKNOWN_TOOLS
            return False, ""
        if outcome.kind is OutcomeKind.INVALID:
            return self.invalid()
        call = _call(outcome.tool, arguments)
        mark = hashlib.sha256(f"{call}\n{_result(outcome)}".encode("utf-8", "surrogatepass")).hexdigest()
        if mark not in self._seen:
            self._seen.add(mark)
            if outcome.kind in _FAILURES and not self._fails_anew(outcome):
                return False, "It fails in the same way as before. Find the cause and change that, or submit."
            self._repeats.clear()
            self._withheld.clear()
            return True, ""
        self._repeats[mark] += 1
        if self._repeats[mark] < MAX_REPEATS:
            return False, "This is the same call with the same result as before. Change something, or submit."
        self._withheld.add(call)
        return (
            False,
            "The same call gave the same result again. It will not be run any more: try another way, or submit.",
        )

    def _fails_anew(self, outcome: Outcome) -> bool:
        """Whether this tool has not failed in these very words before, whatever it was given."""
        failure = f"{outcome.tool}\n{_result(outcome)}"
        known = failure in self._failures
        self._failures.add(failure)
        return not known

    def invalid(self) -> tuple[bool, str]:
        """One call that could not be run as it was written."""
        self._invalid += 1
        self.must_submit = self.must_submit or self._invalid > MAX_INVALID_CALLS
        return False, ""


def _call(tool: str, arguments: str) -> str:
    return f"{tool}\n{canonical_arguments(arguments)}"


def _result(outcome: Outcome) -> str:
    """What the tool said, without what differs by itself from call to call: ids, times, usage."""
    said = [outcome.content, outcome.structured] if outcome.content else [outcome.observation]
    return canonical([str(outcome.kind), outcome.code, *said])
