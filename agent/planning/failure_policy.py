"""What follows when a task has failed: one pure decision from its policy and its revisions so far."""

from __future__ import annotations

from enum import StrEnum

from agent.planning.task import FailurePolicy, TaskNode


class Remedy(StrEnum):
    RETRY = "retry"  # another attempt, with the lessons of this one
    REFINE = "refine"  # the refiner looks at the plan
    SKIP = "skip"  # go on without it
    ASK = "ask"  # wait for a person
    STOP = "stop"  # end the run
    GIVE_UP = "give_up"  # BLOCKED


def remedy(node: TaskNode, max_revisions: int, *, leaf: bool, refined: bool) -> Remedy:
    """For a FAILED task. `refined`: the refiner has had its turns after this failure and did not change the task.

    `alternative` counts as `replan`. `retry` and `ask` give up when all revisions are used, and on a split task, which has
    no attempts of its own.
    """
    again = leaf and node.attempt <= max_revisions
    match node.failure_policy:
        case FailurePolicy.SKIP:
            return Remedy.SKIP
        case FailurePolicy.STOP:
            return Remedy.STOP
        case FailurePolicy.RETRY:
            return Remedy.RETRY if again else Remedy.GIVE_UP
        case FailurePolicy.ASK:
            return Remedy.ASK if again else Remedy.GIVE_UP
        case FailurePolicy.REPLAN | FailurePolicy.ALTERNATIVE:
            return Remedy.GIVE_UP if refined else Remedy.REFINE
