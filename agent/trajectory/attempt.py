"""One attempt at a task: its steps, what was submitted, how it was judged, what was learnt, how the plan changed after it."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.trajectory.step import Judgement, Refinement, Reflection, Step, Submission


@dataclass
class Attempt:
    """Filled by the fold as events arrive; `n` counts from 1."""

    task_id: str
    n: int
    started_at: float = 0.0
    ended_at: float | None = None
    steps: dict[str, Step] = field(default_factory=dict)  # by key, in order
    submission: Submission | None = None
    judgement: Judgement | None = None
    reflection: Reflection | None = None
    refinements: list[Refinement] = field(default_factory=list)

    @property
    def touched_paths(self) -> set[str]:
        """Paths, as the tools named them, that calls of this attempt wrote."""
        paths: set[str] = set()
        for step in self.steps.values():
            for call in step.calls:
                if call.outcome is not None:
                    paths.update(str(a.get("path", "")) for a in call.outcome.get("artifacts") or [])
                    paths.update(str(p) for p in call.outcome.get("workspace_changed") or [])
        return paths - {""}
