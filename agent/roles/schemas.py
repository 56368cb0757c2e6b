"""What the structured roles must answer with: each role has one tool, and its parameters are the answer."""

from __future__ import annotations

from typing import Any

from agent.llm.model import ToolSpec
from agent.planning.draft import DRAFT_SCHEMA, FIELD_SCHEMAS

_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


SUBMIT_PLAN = ToolSpec(
    "submit_plan",
    "Hand in the plan. The tasks are called t1, t2, ... in the order you list them.",
    _object({"tasks": {"type": "array", "minItems": 1, "items": DRAFT_SCHEMA}, "reason": _TEXT}, "tasks"),
)

_OPERATION = _object(
    {
        "op": {"type": "string", "enum": ["split", "add", "modify", "delete", "exit"]},
        "task_id": {"type": "string", "description": "The task to split, modify or delete"},
        "parent_id": {
            "type": "string",
            "description": "For add: the task that the new ones belong to; leave out for the top",
        },
        "tasks": {"type": "array", "items": DRAFT_SCHEMA, "description": "For split and add"},
        "changes": {
            "type": "object",
            "properties": FIELD_SCHEMAS,
            "additionalProperties": False,
            "description": "For modify: only the fields that change",
        },
    },
    "op",
)

REFINE_PLAN = ToolSpec(
    "refine_plan",
    "Change the plan, or leave it with one operation exit. All operations are taken together or none of them.",
    _object({"operations": {"type": "array", "minItems": 1, "items": _OPERATION}, "reason": _TEXT}, "operations"),
)

SUBMIT_VERDICT = ToolSpec(
    "submit_verdict",
    "Hand in the verdict on the task.",
    _object(
        {
            "verdict": {"type": "string", "enum": ["pass", "fail"]},
            "criticism": {
                "type": "string",
                "description": "What is missing or wrong and how to see it; empty when nothing is",
            },
        },
        "verdict",
        "criticism",
    ),
)

SUBMIT_REFLECTION = ToolSpec(
    "submit_reflection",
    "Hand in what was learnt.",
    _object(
        {
            "summary": {"type": "string", "description": "What was done and found, in a few sentences"},
            "plan_lessons": {**_TEXTS, "description": "What later tasks or a better plan should take into account"},
            "tool_lessons": {**_TEXTS, "description": "What to know when using these tools again"},
        },
        "summary",
        "plan_lessons",
        "tool_lessons",
    ),
)

SUBTASK_SUBMIT = ToolSpec(
    "subtask_submit",
    "End this task and hand in its result. Call it alone, when all else is done.",
    _object(
        {
            "result": {
                "type": "string",
                "description": "What was done and found, with the figures and file paths that matter",
            },
            "success": {"type": "boolean", "description": "True only when every acceptance criterion holds"},
            "outputs": {"type": "object", "description": "The declared outputs by name"},
            "reason": {"type": "string", "description": "Without success: why it could not be done"},
            "plan_change": {"type": "string", "description": "Only if later tasks must change: what and why"},
        },
        "result",
        "success",
    ),
)
