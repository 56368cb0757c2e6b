"""The tools that every session has beside those of its images: with them a client that knows only tools follows a 450."""

from __future__ import annotations

from typing import Any

from toolserver.catalog.image import Tool

IMAGE = "toolserver"

_CALL_ID: dict[str, Any] = {
    "type": "string",
    "pattern": "^[A-Za-z0-9_-]{1,128}$",
    "description": "The call_id that the answer still_running named.",
}

CALL_WAIT = Tool(
    name="call_wait",
    description=(
        "Wait for a tool call that is still running and get its result. Use it when a call answered still_running: give its "
        "call_id. Answers still_running again, with the output so far, when the call is not done after wait_s seconds."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "call_id": _CALL_ID,
            "wait_s": {"type": "number", "minimum": 0, "description": "Seconds to wait at most. The server bounds it."},
        },
        "required": ["call_id"],
        "additionalProperties": False,
    },
    output_schema=None,
    annotations={
        "title": "Wait for a running call",
        "readOnlyHint": True,
        "idempotentHint": True,
        "openWorldHint": False,
    },
    image=IMAGE,
)

CALL_CANCEL = Tool(
    name="call_cancel",
    description="Stop a tool call that is still running, and get the output that it made so far. Give its call_id.",
    input_schema={
        "type": "object",
        "properties": {"call_id": _CALL_ID},
        "required": ["call_id"],
        "additionalProperties": False,
    },
    output_schema=None,
    annotations={
        "title": "Cancel a running call",
        "readOnlyHint": False,
        "destructiveHint": True,
        "idempotentHint": True,
        "openWorldHint": False,
    },
    image=IMAGE,
)

CALL_ANSWER = Tool(
    name="call_answer",
    description=(
        "Answer what a running tool call asks its user, and wait on for its result. Use it when a call answered input_required: give "
        "its call_id, and action accept with the content that its requested_schema wants (none for a page to open), decline to "
        "say no, or cancel to dismiss the question."
    ),
    input_schema={
        "type": "object",
        "properties": {
            "call_id": _CALL_ID,
            "action": {"type": "string", "enum": ["accept", "decline", "cancel"]},
            "content": {"type": "object", "description": "The answer, with action accept."},
            "elicitation_id": {
                "type": "integer",
                "minimum": 1,
                "description": "Which question is answered, as it was told. An answer to an earlier one changes nothing.",
            },
            "wait_s": {"type": "number", "minimum": 0, "description": "Seconds to wait at most. The server bounds it."},
        },
        "required": ["call_id", "action"],
        "additionalProperties": False,
    },
    output_schema=None,
    annotations={
        "title": "Answer a question of a running call",
        "readOnlyHint": False,
        "destructiveHint": False,
        "idempotentHint": True,
        "openWorldHint": False,
    },
    image=IMAGE,
)

SESSION_TOOLS: tuple[Tool, ...] = (CALL_WAIT, CALL_CANCEL, CALL_ANSWER)
