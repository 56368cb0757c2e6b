"""The kinds of events in a run's journal. The journal is the truth: plan, history, budget and report are folds over it.

An event is written before what it announces takes effect (`*_REQUESTED`, `*_INTENDED`) and again when it is over
(`*_REPLIED`, `*_SETTLED`). `key` names a place in the run that never changes, such as `t2/a1/actor/s3`: task 2, attempt 1,
the actor's step 3. What is settled under a key is never done again: on resume the journal's answer is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class EventKind(StrEnum):
    """Payload fields after each kind; all are JSON."""

    RUN_STARTED = "run_started"  # goal, files [{path, bytes, sha256}], settings (no secrets), bound {llm_calls, tool_calls}, version
    RUN_RESUMED = "run_resumed"  # pid, reason, budget (the allowances from now on)
    RUN_ENDED = "run_ended"  # state (done|failed|stopped|interrupted), reason, answer, exit_code; a stopped or interrupted run may go on
    LLM_REQUESTED = "llm_requested"  # key, role, model, reserved {tokens, usd}, prompt_sha256
    LLM_REPLIED = (
        "llm_replied"  # key, role, model, reply {text, tool_calls, finish_reason, extra, notes}, usage {...}, usd, ms
    )
    LLM_FAILED = "llm_failed"  # key, role, model, code, message, ms, usage? (charged all the same)
    TOOL_INTENDED = "tool_intended"  # key, call_id, tool, arguments, task_id, effect (read|idempotent|once)
    TOOL_SETTLED = "tool_settled"  # key, call_id, outcome (agent.tools.outcome as JSON), ms
    PLAN_GENERATED = "plan_generated"  # tasks [TaskNode as JSON], reason
    PLAN_EDITED = "plan_edited"  # operations [{op, task_id, ...}], reason, after_task, attempt, step, rejected, key
    TASK_CHANGED = (
        "task_changed"  # task_id, from, to, role, reason, attempt; edits move to revised and cancelled by themselves
    )
    TASK_SUBMITTED = "task_submitted"  # task_id, attempt, result, success, outputs {name: value}, reason, plan_change, key; attempt 0: a split task
    TASK_JUDGED = "task_judged"  # task_id, attempt, verdict (pass|fail), criticism, by (critic|checks), key
    TASK_REFLECTED = "task_reflected"  # task_id, attempt, summary, plan_lessons, tool_lessons, key
    SESSION_OPENED = "session_opened"  # session_id, reason (first|gone), restored_files
    BREAKER_CHANGED = "breaker_changed"  # name, state, failures
    NOTE = "note"  # text: a warning for the report


@dataclass(frozen=True)
class Event:
    """One line of the journal. `at` is seconds since 1970; `hash` is SHA-256 over `prev_hash` and the canonical JSON of the rest."""

    run_id: str
    seq: int
    at: float
    kind: EventKind
    data: dict[str, Any]
    prev_hash: str
    hash: str
