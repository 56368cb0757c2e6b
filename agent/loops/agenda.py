"""What comes next in a run: one pure decision from the folded journal.

A run that was cut off anywhere goes on from here alike: nothing but events decides, and each action ends in an event that
makes the next decision another one.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.planning.dependencies import RollUp, blocked, ready, roll_up
from agent.planning.failure_policy import Remedy, remedy
from agent.planning.task import TaskNode, TaskState
from agent.settings import LoopSettings
from agent.store.fold import RunState
from agent.trajectory.attempt import Attempt
from agent.trajectory.printable import clip

_MAX_REASON = 500


@dataclass(frozen=True)
class Generate:
    """Make the first plan."""


@dataclass(frozen=True)
class Work:
    """Begin or go on with the task's attempt."""

    task_id: str


@dataclass(frozen=True)
class Judge:
    task_id: str


@dataclass(frozen=True)
class Reflect:
    task_id: str


@dataclass(frozen=True)
class Refine:
    """`attempt` is 0 for a task that was split."""

    task_id: str
    attempt: int
    step: int


@dataclass(frozen=True)
class HandOver:
    """A split task whose tasks are all over hands over their results."""

    task_id: str
    told: RollUp


@dataclass(frozen=True)
class Move:
    """A change of state. `attempt` is 0 for a task that was split."""

    task_id: str
    to: TaskState
    role: str
    reason: str
    attempt: int


@dataclass(frozen=True)
class Finish:
    """No more work: `state` is done, failed or stopped (waiting for a person)."""

    state: str
    reason: str


Action = Generate | Work | Judge | Reflect | Refine | HandOver | Move | Finish


def next_action(state: RunState, loop: LoopSettings) -> Action:
    plan = state.plan
    if not len(plan):
        return Generate()
    for node in plan.walk():
        action = _of_leaf(state, node, loop) if plan.is_leaf(node.id) else _of_split(state, node, loop)
        if action is not None:
            return action
    lost = blocked(plan)
    if lost is not None:
        return Move(
            lost.task_id, TaskState.BLOCKED, "plan_loop", clip(lost.reason, _MAX_REASON), plan[lost.task_id].attempt
        )
    first = next(iter(ready(plan)), None)
    if first is not None:
        return Move(first.id, TaskState.EXECUTING, "plan_loop", "its turn has come", first.attempt + 1)
    return _ending(state)


def _of_leaf(state: RunState, node: TaskNode, loop: LoopSettings) -> Action | None:
    attempt = state.attempt(node.id, node.attempt)
    match node.state:
        case TaskState.EXECUTING:
            if attempt.submission is None:
                return Work(node.id)
            if attempt.judgement is None:
                return Judge(node.id)
            return _verdict(node, attempt)
        case TaskState.REVISED:
            return Move(node.id, TaskState.PENDING, "plan_loop", node.reason, node.attempt)
        case TaskState.SUCCESS | TaskState.FAILED:
            if attempt.reflection is None:
                return Reflect(node.id)
            return _after(node, attempt, loop, leaf=True)
        case _:
            return None


def _verdict(node: TaskNode, attempt: Attempt) -> Move:
    judgement = attempt.judgement
    if judgement is not None and judgement.passed:
        return Move(node.id, TaskState.SUCCESS, "critic", "all criteria hold", node.attempt)
    why = (judgement.criticism if judgement is not None else "") or "it did not pass"
    by = "critic" if judgement is not None and judgement.by == "critic" else "plan_loop"
    return Move(node.id, TaskState.FAILED, by, clip(why, _MAX_REASON), node.attempt)


def _of_split(state: RunState, node: TaskNode, loop: LoopSettings) -> Action | None:
    plan = state.plan
    match node.state:
        case TaskState.REVISED:
            return Move(node.id, TaskState.PENDING, "plan_loop", node.reason, 0)
        case TaskState.PENDING:
            if any(c.state not in {TaskState.PENDING, TaskState.BLOCKED} for c in plan.living_children(node.id)):
                return Move(node.id, TaskState.EXECUTING, "plan_loop", "its first task has begun", 0)
            told = roll_up(plan, node.id)
            if told is not None:  # all below it are blocked
                return Move(node.id, TaskState.EXECUTING, "plan_loop", told.reason, 0)
            return None
        case TaskState.EXECUTING:
            told = roll_up(plan, node.id)
            if told is None:
                return None
            if state.attempt(node.id, 0).submission is None:
                return HandOver(node.id, told)
            to = TaskState.SUCCESS if told.success else TaskState.FAILED
            return Move(node.id, to, "plan_loop", clip(told.reason, _MAX_REASON), 0)
        case TaskState.FAILED:
            return _after(node, state.attempt(node.id, 0), loop, leaf=False)
        case _:
            return None


def _after(node: TaskNode, attempt: Attempt, loop: LoopSettings, *, leaf: bool) -> Action | None:
    """What a task that ended still asks for: turns of the refiner, then what its failure policy says."""
    turns = len(attempt.refinements)
    refined = turns >= loop.max_refinements or any(r.exits for r in attempt.refinements)
    number = attempt.n
    if node.state is TaskState.SUCCESS:
        criticised = attempt.judgement is not None and bool(attempt.judgement.criticism)
        asked = attempt.submission is not None and bool(attempt.submission.plan_change)
        return Refine(node.id, number, turns + 1) if (criticised or asked) and not refined else None
    match remedy(node, loop.max_revisions, leaf=leaf, refined=refined):
        case Remedy.REFINE:
            return Refine(node.id, number, turns + 1)
        case Remedy.RETRY:
            reason = f"tried again, {loop.max_revisions - node.attempt} more times possible"
            return Move(node.id, TaskState.REVISED, "failure_policy", reason, number)
        case Remedy.SKIP:
            return Move(node.id, TaskState.SKIPPED, "failure_policy", f"not needed: {node.reason}", number)
        case Remedy.ASK:
            return Move(node.id, TaskState.WAITING, "failure_policy", node.reason, number)
        case Remedy.GIVE_UP:
            return Move(node.id, TaskState.BLOCKED, "failure_policy", node.reason, number)
        case Remedy.STOP:
            return Finish("failed", f"{node.id} failed and the plan says to stop then: {node.reason}")


def _ending(state: RunState) -> Finish:
    plan = state.plan
    waiting = [n for n in plan if n.state is TaskState.WAITING]
    if waiting:
        told = "; ".join(f"{n.id}: {n.reason}" for n in waiting)
        return Finish("stopped", f"waiting for a person: {clip(told, 2000)}. Resume the run to try again.")
    tops = plan.living_children(None)
    good = {TaskState.SUCCESS, TaskState.SKIPPED}
    bad = [n for n in tops if n.state not in good]
    if bad:
        told = "; ".join(f"{n.id} is {n.state}: {n.reason}" for n in bad)
        return Finish("failed", f"not all tasks succeeded: {clip(told, 2000)}")
    if not any(n.state is TaskState.SUCCESS for n in tops):
        return Finish("failed", "no task succeeded")
    return Finish("done", "all tasks are done")
