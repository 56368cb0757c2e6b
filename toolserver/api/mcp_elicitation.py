"""What a tool asks in the midst of a call, put to the user of an MCP client: as a request, or in the stateless revision as a result."""

from __future__ import annotations

import re
from typing import Any

from toolserver.api.mcp_messages import Rpc
from toolserver.calls.idempotency import is_key

_ELICIT = "elicitation/create"
_ID = re.compile(r"elicit:([0-9]{1,9}):(.+)")
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
    asked = {str(told["elicitation"]["id"]): {"method": _ELICIT, "params": _params(told)}}
    return {"resultType": "input_required", "inputRequests": asked, "requestState": told["arguments"]["call_id"]}


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


def answers_in(params: dict[str, Any], call_id: str) -> list[dict[str, Any]]:
    """The arguments of `call_answer` in a call that is made again."""
    given = params.get("inputResponses")
    numbered = given.items() if isinstance(given, dict) else ()
    return [
        {"call_id": call_id, "elicitation_id": int(number), **_reply(said)}
        for number, said in numbered
        if re.fullmatch(r"[1-9][0-9]{0,8}", number)
    ]


def _reply(said: Any) -> dict[str, Any]:
    """What is no answer dismisses the question: the tool must not wait for one that never comes."""
    action = said.get("action") if isinstance(said, dict) else None
    if action not in ("accept", "decline", "cancel"):
        return {"action": "cancel"}
    content = said.get("content")
    return {"action": action, **({"content": content} if action == "accept" and content is not None else {})}
