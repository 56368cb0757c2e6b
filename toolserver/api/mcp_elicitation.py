"""What a tool asks in the midst of a call, put to the user of an MCP client: as a request, or in the stateless revision as a result."""

from __future__ import annotations

import re
from typing import Any

from toolserver.api.mcp_messages import Rpc
from toolserver.calls.idempotency import is_key

_ELICIT = "elicitation/create"
_STATE = re.compile(r"([1-9][0-9]{0,8}):(.+)")
_ID = re.compile("elicit:" + _STATE.pattern)
_WORDS = {"requested_schema": "requestedSchema"}


def modes(capabilities: Any) -> frozenset[str]:
    """In which modes a client with these capabilities asks its user. One that names none means forms."""
    asks = capabilities.get("elicitation") if isinstance(capabilities, dict) else None
    if not isinstance(asks, dict):
        return frozenset()
    return frozenset({"form", "url"} & asks.keys()) or frozenset({"form"})


def can(elicits: frozenset[str], told: dict[str, Any]) -> bool:
    """Whether the question of an `input_required` is for such a client."""
    return told["elicitation"]["mode"] in elicits


def request(told: dict[str, Any]) -> dict[str, Any]:
    """As a request, whose id names the call and the question."""
    number, call_id = told["elicitation"]["id"], told["arguments"]["call_id"]
    return {"jsonrpc": "2.0", "id": f"elicit:{number}:{call_id}", "method": _ELICIT, "params": _params(told)}


def required(told: dict[str, Any]) -> dict[str, Any]:
    """As the result of a call that is to be made again, with the answer."""
    number, call_id = told["elicitation"]["id"], told["arguments"]["call_id"]
    asked = {str(number): {"method": _ELICIT, "params": _params(told)}}
    return {"resultType": "input_required", "inputRequests": asked, "requestState": f"{number}:{call_id}"}


def _params(told: dict[str, Any]) -> dict[str, Any]:
    elicitation = {n: v for n, v in told["elicitation"].items() if n not in ("id", "tool") and v is not None}
    if elicitation["mode"] == "url":
        elicitation["elicitationId"] = f"{told['elicitation']['id']}:{told['arguments']['call_id']}"
    return {_WORDS.get(name, name): value for name, value in elicitation.items()}


def answer_of(rpc: Rpc) -> dict[str, Any] | None:
    """The arguments of `call_answer` in a response to a request of ours; None for a response to anything else."""
    named = _ID.fullmatch(rpc.id) if isinstance(rpc.id, str) else None
    if named is None or not is_key(named[2]):
        return None
    return {"call_id": named[2], "elicitation_id": int(named[1]), **_reply(rpc.params.get("result"))}


def again(state: Any, responses: Any) -> tuple[str, dict[str, Any] | None] | None:
    """Of a call that is made again: its id, and the arguments of `call_answer` if it has an answer.

    None when the state is not one of ours. `responses` may lack the answer: then it is asked for once more.
    """
    named = _STATE.fullmatch(state) if isinstance(state, str) else None
    if named is None or not is_key(named[2]):
        return None
    said = responses.get(named[1]) if isinstance(responses, dict) else None
    answer = None if said is None else {"call_id": named[2], "elicitation_id": int(named[1]), **_reply(said)}
    return named[2], answer


def _reply(said: Any) -> dict[str, Any]:
    """What is no answer dismisses the question: the tool must not wait for one that never comes."""
    action = said.get("action") if isinstance(said, dict) else None
    if action not in ("accept", "decline", "cancel"):
        return {"action": "cancel"}
    content = said.get("content")
    return {"action": action, **({"content": content} if action == "accept" and content is not None else {})}
