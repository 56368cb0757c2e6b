"""A tool's question to its caller: how it is told, and what an answer has to be like."""

from __future__ import annotations

from typing import Any

from toolserver.calls.running import Asked, RunningCall
from toolserver.catalog import arguments as schema_check
from toolserver.catalog.image import Tool
from toolserver.catalog.session_tools import CALL_ANSWER
from toolserver.errors import invalid, invalid_all
from toolserver.sandbox.questions import Reply


def as_asked(call: RunningCall, asked: Asked) -> dict[str, Any]:
    """How to go on, and the question."""
    return {
        "next_calling": CALL_ANSWER.name,
        "arguments": {"call_id": call.call_id, "elicitation_id": asked.number},
        "elicitation": {"id": asked.number, "tool": call.tool.name, **asked.question.as_json()},
    }


def settle(call: RunningCall, given: dict[str, Any]) -> None:
    """Give the arguments of a `call_answer` to the question that is open. Raises invalid_arguments: then it stays open.

    An answer that names an earlier question came twice, and changes nothing.
    """
    asked, number = call.asked, given.get("elicitation_id")
    if number is not None and number <= call.questions and (asked is None or number != asked.number):
        return
    if asked is None or number not in (None, asked.number):
        raise invalid("/arguments/call_id", "this call asks nothing now")
    reply = Reply(given["action"], given.get("content"))
    _check(asked, reply)
    asked.reply.set_result(reply)


def _check(asked: Asked, reply: Reply) -> None:
    """Raises invalid_arguments."""
    schema = asked.question.requested_schema
    if reply.content is not None and (reply.action != "accept" or schema is None):
        raise invalid("/arguments/content", "goes with the action accept to a question with a requested_schema only")
    if reply.action != "accept" or schema is None:
        return
    wanted = Tool(CALL_ANSWER.name, "", schema, None, {}, CALL_ANSWER.image)
    if errors := schema_check.check(wanted, reply.content or {}):
        raise invalid_all([{**error, "pointer": "/arguments/content" + error["pointer"]} for error in errors])
