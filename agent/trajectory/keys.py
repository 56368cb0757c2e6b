"""Keys: names of places in a run that never change. What is settled under a key is never done again.

`plan/generator/r0`       the first request to the plan generator; r1 is its corrective turn
`t2/a1/actor/s3`          task t2, attempt 1, the actor's step 3; `t2/a1/actor/s3/r1` the same step asked again
`t2/a1/actor/s3/c0`       the first tool call of that step
`t2/a1/critic/r0`         likewise reflector, and `refiner/s2/r0` for the second refinement after that attempt
`answer/summariser/r0`    the final answer
`summary/<hash>`          a long tool output made short, by the output's hash
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PLAN = "plan/generator"
ANSWER = "answer/summariser"
SUMMARY = "summary"

_STEP = re.compile(
    r"(?P<task>t[0-9.]+)/a(?P<attempt>\d+)/actor/s(?P<step>\d+)(?:/r(?P<again>\d+))?(?:/c(?P<call>\d+))?"
)
_TASK = re.compile(r"(?P<task>t[0-9.]+)/a(?P<attempt>\d+)/")


@dataclass(frozen=True)
class StepKey:
    """Parts of the key of an actor's request or tool call; `again` counts the repeats of one step."""

    task_id: str
    attempt: int
    step: int
    again: int = 0
    call: int | None = None

    @classmethod
    def parse(cls, key: str) -> StepKey | None:
        found = _STEP.fullmatch(key)
        if found is None:
            return None
        call = found["call"]
        return cls(
            found["task"],
            int(found["attempt"]),
            int(found["step"]),
            int(found["again"] or 0),
            None if call is None else int(call),
        )

    @property
    def request(self) -> str:
        again = f"/r{self.again}" if self.again else ""
        return f"{attempt_key(self.task_id, self.attempt)}/actor/s{self.step}{again}"

    def of_call(self, index: int) -> str:
        return f"{self.request}/c{index}"


def attempt_key(task_id: str, attempt: int) -> str:
    return f"{task_id}/a{attempt}"


def role_key(task_id: str, attempt: int, role: str, step: int | None = None) -> str:
    """The place of a structured role; the desk adds `/r0`, `/r1` for the tries."""
    place = f"{attempt_key(task_id, attempt)}/{role}"
    return place if step is None else f"{place}/s{step}"


def attempt_of(key: str) -> tuple[str, int] | None:
    """Task id and attempt that a key belongs to; None for the plan and the answer."""
    found = _TASK.match(key)
    return None if found is None else (found["task"], int(found["attempt"]))
