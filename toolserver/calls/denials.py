"""What the egress proxy refused while a call ran: told in the call's error, and written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from toolserver.calls.running import RunningCall
from toolserver.errors import Code, ToolServerError
from toolserver.sessions.doors import Owner

_MOST = 16  # of one call; the journal has them all
_TURNED = (Code.TOOL_FAILED, Code.TOOL_CRASHED, Code.POLICY_DENIED)
_BY_POLICY = frozenset({"none", "not_allowed"})
_NOT_PUBLIC = frozenset({"private_name", "private_address"})
_SHOWN = 3


def note(calls: Iterable[RunningCall], owner: Owner, told: Mapping[str, Any]) -> list[str]:
    """Keep it with the calls that run in the owner's sandbox now; their ids."""
    denial = {name: told.get(name) for name in ("host", "port", "rule")}
    concerned = [
        call
        for call in calls
        if call.sandbox is not None
        and call.tool.image == owner.image
        and (
            call.session.session_id == owner.session_id
            or (owner.session_id == "shared" and call.tenant == owner.tenant)
        )
    ]
    for call in concerned:
        if len(call.denied) < _MOST and denial not in call.denied:
            call.denied.append(denial)
    return [call.call_id for call in concerned]


async def told(error: ToolServerError, call: RunningCall) -> ToolServerError:
    """The same error; of a call that failed while something was refused to it: policy_denied, with what that was."""
    if error.code not in _TURNED:
        return error
    await call.session.boxes[call.tool.image].egress_settled()
    if not call.denied:
        return error
    extra = {**error.extra, "denied": call.denied}
    if error.code is Code.POLICY_DENIED:
        return ToolServerError(error.code, error.message, error.call_id, extra=extra, effects=error.effects)
    places = ", ".join(f"{one['host']}:{one['port']} ({one['rule']})" for one in call.denied[:_SHOWN])
    more = f" and {len(call.denied) - _SHOWN} more" if len(call.denied) > _SHOWN else ""
    message = f"The egress proxy refused {places}{more}. {_advice(call)} {error.message}"
    return ToolServerError(Code.POLICY_DENIED, message, error.call_id, extra=extra, effects="possible")


def _advice(call: RunningCall) -> str:
    """What can be done about it: a rule of the session is not what stands in the way of a private address."""
    rules = {str(one["rule"]) for one in call.denied}
    advice = []
    if rules & _BY_POLICY:
        advice.append(
            f"Allow it with PUT /v1/sessions/{call.session.session_id}/egress, as far as the operator lets sessions reach out, or "
            "do without."
        )
    if rules & _NOT_PUBLIC:
        advice.append("What is not public no session can allow: only the operator's setting egress.allow_private can.")
    if rules - _BY_POLICY - _NOT_PUBLIC:
        advice.append("docs/reference/egress.md says what each rule wants.")
    return " ".join(advice)
