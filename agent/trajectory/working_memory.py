"""What later prompts are to know of what went before: the lessons of all attempts, newest last, each once."""

from __future__ import annotations

from collections.abc import Iterable

from agent.trajectory.attempt import Attempt

MAX_LESSONS = 12


def plan_lessons(attempts: Iterable[Attempt]) -> list[str]:
    return _newest(lesson for a in _in_order(attempts) if a.reflection for lesson in a.reflection.plan_lessons)


def tool_lessons(attempts: Iterable[Attempt]) -> list[str]:
    return _newest(lesson for a in _in_order(attempts) if a.reflection for lesson in a.reflection.tool_lessons)


def earlier_attempts(attempts: Iterable[Attempt], task_id: str) -> list[Attempt]:
    """The finished attempts at one task, oldest first: what was tried and why it was not good enough."""
    return [a for a in _in_order(attempts) if a.task_id == task_id and a.judgement is not None]


def _in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    return sorted(attempts, key=lambda a: (a.ended_at if a.ended_at is not None else float("inf"), a.n))


def _newest(lessons: Iterable[str]) -> list[str]:
    latest = dict.fromkeys(reversed([lesson.strip() for lesson in lessons if lesson.strip()]))
    return list(latest)[:MAX_LESSONS][::-1]
