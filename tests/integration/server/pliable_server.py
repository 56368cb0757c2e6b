"""An MCP server on stdio that does what a test wants: copied into images. argv: names of further tools."""

# ruff: noqa: T201 - it speaks on stdout
from __future__ import annotations

import base64
import json
import os
import sys
import uuid
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string", "description": "Any text."}}, "required": ["text"]}
names = ["say", "leak", "grow", *sys.argv[1:]]


def listed() -> list[dict[str, object]]:
    whims = [f"whim_{uuid.uuid4().hex[:6]}"] if os.environ.get("WHIMS") else []
    return [{"name": name, "description": f"Does {name}.", "inputSchema": TEXT} for name in (*names, *whims)]


def write(message: dict[str, object]) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def leak() -> dict[str, object]:
    """The secret in every form that is to be found."""
    token = os.environ.get("TOKEN", "")
    coded = base64.b64encode(token.encode()).decode()
    within = base64.b64encode(b"x" + token.encode() + b"y").decode()
    print(token, file=sys.stderr, flush=True)
    return {
        "content": [{"type": "text", "text": f"token {token} {coded} {within}"}],
        "structuredContent": {"deep": [{token: token}], "coded": coded},
    }


def call(params: dict[str, Any]) -> dict[str, object]:
    name, text = params["name"], params.get("arguments", {}).get("text", "")
    if name == "leak":
        if text == "as an error":
            return {**leak(), "isError": True}
        return leak()
    if name == "grow":
        names.append("grown")
        write({"method": "notifications/tools/list_changed"})
    return {"content": [{"type": "text", "text": f"{name}: {text}"}]}


for line in sys.stdin:
    message = json.loads(line)
    method, params = message.get("method"), message.get("params", {})
    if "id" not in message:
        continue
    if method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        told = {"protocolVersion": params["protocolVersion"], "capabilities": capabilities}
        result = {**told, "serverInfo": {"name": "pliable", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": listed()}
    elif method == "tools/call" and params["name"] in names:
        result = call(params)
    elif method == "ping":
        result = {}
    else:
        write({"id": message["id"], "error": {"code": -32602, "message": f"no {method}"}})
        continue
    write({"id": message["id"], "result": result})
