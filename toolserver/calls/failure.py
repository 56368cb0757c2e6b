"""From how a call ended to what its caller is told. The one table of it: a code is never guessed from an exit status.

An end that the worker told is taken as told. When the stream broke instead, the runtime's word on the sandbox's end
decides: known deaths (`oom`, `exited`, `killed`) are the tool's; a sandbox that was removed or lost with its engine may
have finished its work first, so nobody can say how the call ended: outcome_unknown.
"""

from __future__ import annotations

from typing import Any

from toolserver.calls.outcome import Outcome, empty_fields
from toolserver.errors import Code, Effects, ToolServerError, invalid_all
from toolserver.runtime.base import SandboxEnd
from toolserver.sandbox.stdio_client import INVALID_PARAMS, RESPONSE_TOO_LARGE, URL_ELICITATION, RpcError

_TELLING = 10  # a tool's own message with fewer characters than this tells too little by itself
_CODES: dict[str, tuple[Code, str]] = {
    "failed": (Code.TOOL_FAILED, "The tool ran and failed; its output says why."),
    "crashed": (Code.TOOL_CRASHED, "The tool's process died before the call was done."),
    "deadline": (
        Code.DEADLINE_EXCEEDED,
        "The call outlived its deadline_s and was stopped. Do less at a time, or give a longer deadline_s.",
    ),
    "oom": (
        Code.OOM_KILLED,
        "The call used more memory than the session has. Use less at a time, or ask for a larger memory_mb.",
    ),
    "disk_full": (Code.DISK_FULL, "The workspace is full. Delete files, or ask for a larger disk_mb."),
    "cancelled": (Code.CANCELLED, "The call was cancelled."),
    "denied": (Code.POLICY_DENIED, "The policy of this server does not allow it."),
}
_DEATHS: dict[str, tuple[Code, str]] = {
    "oom": (
        Code.OOM_KILLED,
        "The sandbox ran out of memory and was ended. The next call gets a fresh one; files are kept, interpreter state is lost.",
    ),
    "exited": (
        Code.TOOL_CRASHED,
        "The sandbox ended by itself in the middle of the call. The next call gets a fresh one; interpreter state is lost.",
    ),
    "killed": (
        Code.TOOL_CRASHED,
        "The sandbox was killed in the middle of the call. The next call gets a fresh one; interpreter state is lost.",
    ),
}
_CANCELLERS: dict[str, str] = {"caller": "its caller", "shutdown": "the shutdown of the server"}
_LOST_SANDBOX = (
    "The sandbox was lost in the middle of the call, so how it ended can't be told: it may have had effects. "
    "Look at the workspace before doing it again."
)
_UNKNOWN = (Code.OUTCOME_UNKNOWN, _LOST_SANDBOX)
_POSSIBLE: dict[str, Effects] = {"denied": "possible"}  # it ran until it was denied


def refusal(outcome: Outcome, call_id: str, cancelled_by: str | None = None) -> ToolServerError | None:
    """The error of an outcome; None when it is a success. `cancelled_by`: who asked for its end, if anybody did."""
    if outcome.end == "done":
        return None
    if outcome.end == "invalid":
        errors = outcome.errors or [{"pointer": "", "message": outcome.message or "the tool refuses these arguments"}]
        error = invalid_all([{**told, "pointer": f"/arguments{told['pointer']}"} for told in errors])
        error.call_id = call_id
        return error
    code, usual = _CODES[outcome.end]
    extra = dict(outcome.fields)
    if outcome.end == "deadline":
        extra["type"] = "timeout"
    if outcome.end == "cancelled":
        extra["cancelled_by"] = cancelled_by
    message = outcome.message.strip()
    if outcome.end == "cancelled" and cancelled_by is not None:
        message = (
            f"The call was cancelled by {_CANCELLERS[cancelled_by]}. {message.removeprefix(usual).strip()}".strip()
        )
    told = message if len(message) >= _TELLING else f"{usual} {message}".strip()
    return ToolServerError(code, told, call_id, extra=extra, effects=_POSSIBLE.get(outcome.end))


def stopped_hard(
    end: str, call_id: str, content: list[dict[str, Any]], cancelled_by: str | None = None
) -> ToolServerError:
    """For a call that did not end when asked to (`deadline` or `cancelled`), so that its whole sandbox was ended."""
    code, usual = _CODES[end]
    message = (
        f"{usual} It did not stop when asked to, so its sandbox was ended: interpreter state is lost, files are kept."
    )
    told = {"type": "timeout"} if end == "deadline" else {"cancelled_by": cancelled_by}
    return ToolServerError(code, message, call_id, extra={**empty_fields(content), "state": "lost", **told})


def confirmed(end: str, call_id: str, cancelled_by: str | None = None) -> ToolServerError:
    """As `stopped_hard`, of a call that ended when its tool server was asked to end it: the sandbox goes on."""
    told = {"type": "timeout"} if end == "deadline" else {"cancelled_by": cancelled_by}
    return ToolServerError(_CODES[end][0], _CODES[end][1], call_id, extra={**empty_fields(), "state": "kept", **told})


def left_alone(end: str, call_id: str, cancelled_by: str | None = None) -> ToolServerError:
    """As `stopped_hard`, where other calls run in the same sandbox: it is ended after them."""
    code, usual = _CODES[end]
    message = (
        f"{usual} Its tool server was told so and did not confirm it; since other calls run there, it is ended only after them. "
        "What the call does until then is not known."
    )
    told = {"type": "timeout"} if end == "deadline" else {"cancelled_by": cancelled_by}
    return ToolServerError(code, message, call_id, extra={**empty_fields(), "state": "kept", **told})


def never_ran(call_id: str, cancelled_by: str) -> ToolServerError:
    """For a call that was cancelled before it was sent to its sandbox."""
    message = (
        f"The call was cancelled by {_CANCELLERS[cancelled_by]} before it was sent to its sandbox. Nothing was run."
    )
    extra = {**empty_fields(), "cancelled_by": cancelled_by}
    return ToolServerError(Code.CANCELLED, message, call_id, extra=extra, effects="none")


def death(end: SandboxEnd, call_id: str) -> ToolServerError:
    """For a call whose sandbox died under it."""
    code, message = _DEATHS.get(end.cause, _UNKNOWN)
    extra = {**empty_fields(), "state": "lost", "sandbox_end": end.cause}
    if end.cause == "exited" and end.exit_code is not None:
        extra["exit_code"] = end.exit_code
        message = message.replace("by itself", f"by itself (exit code {end.exit_code})", 1)
    return ToolServerError(code, message, call_id, extra=extra)


def protocol_error(problem: RpcError, call_id: str) -> ToolServerError:
    """For a tool server that answered the call with a JSON-RPC error."""
    if problem.code == INVALID_PARAMS:
        error = invalid_all(
            [{"pointer": "/arguments", "message": problem.message or "the tool refuses these arguments"}]
        )
        error.call_id = call_id
        return error
    if problem.code == URL_ELICITATION and (pages := _pages(problem.data)):
        message = f"The tool needs its user to open {' and '.join(pages)} first: {problem.message}"
    elif problem.code == RESPONSE_TOO_LARGE:
        message = "The tool's answer was too large to be taken over. Ask for less, or have it write a file."
    else:
        message = f"The tool server answered with an error: {problem.message or problem.code}"
    content = [{"type": "text", "text": message}]
    return ToolServerError(Code.TOOL_FAILED, message, call_id, extra=empty_fields(content))


def _pages(data: Any) -> list[str]:
    """The addresses that an error of the kind URL_ELICITATION names."""
    listed = data.get("elicitations") if isinstance(data, dict) else None
    urls = [one.get("url") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [url[:2000] for url in urls[:4] if isinstance(url, str)]


def unreadable(call_id: str) -> ToolServerError:
    message = "The tool server's answer is no MCP result, so what the tool did can't be told."
    return ToolServerError(Code.TOOL_FAILED, message, call_id, extra=empty_fields())


def misfit(errors: list[dict[str, str]], call_id: str, fields: dict[str, Any]) -> ToolServerError:
    """For a tool that ran and whose structured result is not what its own output schema promises."""
    told = "; ".join(f"{e['pointer'] or 'the result'}: {e['message'].rstrip('. ')}" for e in errors[:5])
    message = (
        f"The tool ran, and its structured result does not fit its own output_schema: {told}. What it did stands; its content is "
        "here, its structured result was left out. Calling it again with the same arguments is of no use."
    )
    return ToolServerError(Code.TOOL_FAILED, message, call_id, extra={**fields, "errors": errors[:20]})


def interrupted(call_id: str) -> ToolServerError:
    """For a call whose sandbox is gone, or knows nothing of it any more, after the server itself died."""
    message = (
        "The server stopped in the middle of the call and its sandbox can't tell what came of it, so how it ended can't be told: it may have had effects. "
        "It is not run again under this call_id."
    )
    return ToolServerError(Code.OUTCOME_UNKNOWN, message, call_id, extra=empty_fields())


def never_received(call_id: str) -> ToolServerError:
    """For a call that a server wrote down and died before it was sent: it was not received and never will be."""
    message = (
        "Nothing was run: the call was interrupted before it reached its sandbox. Send it again, under the same key."
    )
    return ToolServerError(Code.RUNTIME_UNAVAILABLE, message, call_id, retry_after_s=0)
