"""Tools and outcomes of the contract in the words of MCP."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from toolserver.api.mcp_messages import invalid_params
from toolserver.api.mcp_revisions import Revision
from toolserver.calls.answer import Answer
from toolserver.catalog.image import Tool
from toolserver.errors import Code

_HEADER = "x-mcp-header"
_SHOWN_WHOLE = ("content", "structured")
# what a model must see and can act on; all else that is refused is the protocol's: the caller's mistake, or the server's state
_TELLS_MODEL = frozenset(
    {
        Code.TOOL_FAILED, Code.TOOL_CRASHED, Code.OOM_KILLED, Code.DISK_FULL, Code.POLICY_DENIED, Code.CANCELLED,
        Code.OUTCOME_UNKNOWN, Code.DEADLINE_EXCEEDED, Code.STILL_RUNNING,
    }
)  # fmt: skip


def page(tools: Sequence[Tool], cursor: Any, size: int) -> tuple[Sequence[Tool], str | None]:
    """The tools after the one that the cursor names, and the cursor of the next page. Raises RpcFault for one that is none of ours."""
    start = 0
    if cursor is not None:
        last = _tool_of(cursor)
        places = [place for place, tool in enumerate(tools) if tool.name == last]
        if not places:
            raise invalid_params("The cursor is not one of this server's, or its tool is gone. List the tools anew.")
        start = places[0] + 1
    shown = tools[start : start + size]
    more = start + size < len(tools)
    return shown, base64.urlsafe_b64encode(shown[-1].name.encode()).decode() if more else None


def _tool_of(cursor: Any) -> str | None:
    if not isinstance(cursor, str) or not cursor.isascii():
        return None
    try:
        return base64.b64decode(cursor, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def shown(tool: Tool, revision: Revision) -> dict[str, Any]:
    """A tool as `tools/list` has it."""
    told: dict[str, Any] = {"name": tool.name}
    if isinstance(title := tool.annotations.get("title"), str):
        told["title"] = title
    told |= {"description": tool.description, "inputSchema": _plain(tool.input_schema)}
    output = tool.output_schema
    if output is not None and (revision.any_structure or output.get("type") == "object"):
        told["outputSchema"] = output
    return {**told, "annotations": tool.annotations, "_meta": {"toolcrib/image": tool.image}}


def _plain(schema: Any) -> Any:
    """Without the marks by which arguments are to be sent as headers too: the tool's own server is not reached over HTTP."""
    if isinstance(schema, dict):
        return {n: _plain(v) for n, v in schema.items() if not (n.lower() == _HEADER and isinstance(v, str))}
    return [_plain(item) for item in schema] if isinstance(schema, list) else schema


def result(answer: Answer, revision: Revision, session_id: str | None) -> dict[str, Any] | None:
    """The result of `tools/call`; None when the answer is an error of the protocol, not of the tool."""
    body = answer.json()
    failed = answer.status != 200
    told = body["detail"] if failed else body
    if failed and not tells_model(told, revision):
        return None
    content = [_block(block, revision) for block in told.get("content") or []]
    if failed and (told["code"] != Code.TOOL_FAILED or not content):
        content.append({"type": "text", "text": told["message"] + _how_to_go_on(told)})
    made: dict[str, Any] = {"content": content, "isError": failed}
    structured = told.get("structured")
    if "structured" in told and (revision.any_structure or isinstance(structured, dict)):
        made["structuredContent"] = structured
    if "structured" in told and not content:
        content.append({"type": "text", "text": json.dumps(structured, ensure_ascii=False)})
    about = {name: value for name, value in told.items() if name not in _SHOWN_WHOLE}
    made["_meta"] = {"toolcrib/error" if failed else "toolcrib/outcome": about}
    if session_id is not None:
        made["_meta"]["toolcrib/session"] = session_id
    return made


def _how_to_go_on(told: dict[str, Any]) -> str:
    """With what a call that is not done is gone on with: a model sees the text alone."""
    if "next_calling" not in told:
        return ""
    schema = told.get("elicitation", {}).get("requested_schema")
    asked = "" if schema is None else f" requested_schema: {json.dumps(schema, ensure_ascii=False)}"
    return f"\n{told['next_calling']} {json.dumps(told['arguments'])}{asked}"


def tells_model(detail: dict[str, Any], revision: Revision) -> bool:
    """Whether a refusal or failure is the result of a call, which its model reads."""
    code = Code(detail["code"])
    return code in _TELLS_MODEL or (code is Code.INVALID_ARGUMENTS and revision.tells_bad_arguments)


def _block(block: dict[str, Any], revision: Revision) -> dict[str, Any]:
    if block.get("type") == "resource_link" and not revision.links:
        return {"type": "text", "text": f"{block.get('name', 'resource')}: {block.get('uri', '')}"}
    if block.get("type") == "audio" and not revision.audio:
        return {
            "type": "text",
            "text": f"[audio, {block.get('mimeType', 'of no type')}: this client's version of MCP has none]",
        }
    return block
