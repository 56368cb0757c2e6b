"""An MCP server on stdio with the tools that the conformance suite asks for by name. Runs as an added image, on Python alone."""

from __future__ import annotations

import base64
import itertools
import json
import queue
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

Send = Callable[[str, dict[str, Any]], None]
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png() -> str:
    """One red pixel."""
    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    body = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + _chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _wav() -> str:
    """Eight samples of silence."""
    data = b"\x80" * 8
    form = struct.pack("<HHIIHH", 1, 1, 8000, 8000, 1, 8)
    head = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return base64.b64encode(b"RIFF" + struct.pack("<I", len(head)) + head).decode()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


_IMAGE = {"type": "image", "data": _png(), "mimeType": "image/png"}
_RESOURCE = {
    "type": "resource",
    "resource": {"uri": "test://embedded", "mimeType": "application/json", "text": '{"test":"data","value":123}'},
}


class Server:
    """Each call in a thread of its own, since a tool may wait for an answer of its client."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._asked: dict[str, queue.Queue[dict[str, Any]]] = {}

    def run(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "method" not in message:
                self._asked.pop(message["id"]).put(message)
            elif "id" in message:
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _put(self, message: dict[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            sys.stdout.flush()

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """A request to the client; its whole answer."""
        name, came = f"ask-{next(self._ids)}", queue.Queue[dict[str, Any]]()
        self._asked[name] = came
        self._put({"id": name, "method": method, "params": params})
        return came.get()

    def _answer(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message["method"]:
            case "initialize":
                made: dict[str, Any] = {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {"tools": {}, "logging": {}},
                    "serverInfo": {"name": "conformance-tools", "version": "1"},
                }
            case "tools/list":
                made = {"tools": [{"name": name, **tool} for name, (tool, _) in TOOLS.items()]}
            case "tools/call":
                made = self._call(params)
            case _:
                made = {}
        self._put({"id": message["id"], "result": made})

    def _call(self, params: dict[str, Any]) -> dict[str, Any]:
        token = params.get("_meta", {}).get("progressToken")

        def send(method: str, told: dict[str, Any]) -> None:
            if method != "notifications/progress":
                self._put({"method": method, "params": told})
            elif token is not None:
                self._put({"method": method, "params": {"progressToken": token, **told}})

        try:
            content = TOOLS[params["name"]][1](self, params.get("arguments", {}), send)
        except ToolFault as fault:
            return {"content": [_text(str(fault))], "isError": True}
        return {"content": content}


class ToolFault(Exception):  # noqa: N818 - it is what the suite calls an error
    """What the model is told of a call that failed."""


Body = Callable[[Server, dict[str, Any], Send], list[dict[str, Any]]]


def _log(_server: Server, _arguments: dict[str, Any], send: Send) -> list[dict[str, Any]]:
    for text in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        send("notifications/message", {"level": "info", "data": text})
        time.sleep(0.05)
    return [_text("logged")]


def _progress(_server: Server, _arguments: dict[str, Any], send: Send) -> list[dict[str, Any]]:
    for done in (0, 50, 100):
        send("notifications/progress", {"progress": done, "total": 100})
        time.sleep(0.3)  # a slow follower only hears the latest
    return [_text("done")]


def _slow(server: Server, arguments: dict[str, Any], send: Send) -> list[dict[str, Any]]:
    time.sleep(1)
    return _progress(server, arguments, send)


def _fail(_server: Server, _arguments: dict[str, Any], _send: Send) -> list[dict[str, Any]]:
    raise ToolFault("This tool intentionally returns an error for testing")


def _elicit(*schemas: dict[str, Any]) -> Body:
    """Asks the user for what each schema says, one after the other, and tells what came."""

    def body(server: Server, arguments: dict[str, Any], _send: Send) -> list[dict[str, Any]]:
        told = []
        for schema in schemas:
            asked = {"message": arguments.get("message", "Please answer."), "requestedSchema": schema}
            came = server.ask("elicitation/create", asked)
            if "error" in came:
                raise ToolFault(f"The client refused: {came['error']['message']}")
            told.append(_text(f"User response: {json.dumps(came['result'])}"))
        return told

    return body


def _sample(server: Server, arguments: dict[str, Any], _send: Send) -> list[dict[str, Any]]:
    message = {"role": "user", "content": _text(arguments.get("prompt", "Hello"))}
    came = server.ask("sampling/createMessage", {"messages": [message], "maxTokens": 100})
    if "error" in came:
        raise ToolFault(f"The client refused: {came['error']['message']}")
    return [_text(f"LLM response: {came['result']['content']['text']}")]


def _roots(server: Server, _arguments: dict[str, Any], _send: Send) -> list[dict[str, Any]]:
    came = server.ask("roots/list", {})
    if "error" in came:
        raise ToolFault(f"The client refused: {came['error']['message']}")
    return [_text(f"Roots: {json.dumps(came['result'])}")]


def _says(*content: dict[str, Any]) -> Body:
    return lambda _server, _arguments, _send: list(content)


def _form(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": []}


def _wants(name: str, kind: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}


_PERSON = {
    "type": "object",
    "properties": {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    },
    "required": ["username", "email"],
}
_DEFAULTS = _form(
    name={"type": "string", "default": "John Doe"},
    age={"type": "integer", "default": 30},
    score={"type": "number", "default": 95.5},
    status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    verified={"type": "boolean", "default": True},
)
_ONE = [{"const": f"value{n}", "title": f"{name} Option"} for n, name in enumerate(("First", "Second", "Third"), 1)]
_ENUMS = _form(
    untitledSingle={"type": "string", "enum": ["option1", "option2", "option3"]},
    titledSingle={"type": "string", "oneOf": _ONE},
    legacyEnum={
        "type": "string",
        "enum": ["opt1", "opt2", "opt3"],
        "enumNames": ["Option One", "Option Two", "Option Three"],
    },
    untitledMulti={"type": "array", "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
    titledMulti={"type": "array", "items": {"anyOf": _ONE}},
)
_HEADER = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
_2020_12 = {
    "$schema": _DRAFT,
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


def _tool(description: str, schema: dict[str, Any] = _NOTHING) -> dict[str, Any]:
    return {"description": description, "inputSchema": schema}


def _asking(description: str, argument: str) -> dict[str, Any]:
    return _tool(description, {"type": "object", "properties": {argument: {"type": "string"}}})


TOOLS: dict[str, tuple[dict[str, Any], Body]] = {
    "test_simple_text": (_tool("Says a text."), _says(_text("This is a simple text response for testing."))),
    "test_image_content": (_tool("Shows a picture."), _says(_IMAGE)),
    "test_audio_content": (
        _tool("Plays a sound."),
        _says({"type": "audio", "data": _wav(), "mimeType": "audio/wav"}),
    ),
    "test_embedded_resource": (_tool("Gives a resource."), _says(_RESOURCE)),
    "test_multiple_content_types": (
        _tool("Text, picture, resource."),
        _says(_text("Multiple content types test:"), _IMAGE, _RESOURCE),
    ),
    "test_tool_with_logging": (_tool("Logs three times."), _log),
    "test_logging_tool": (_tool("Logs three times."), _log),
    "test_error_handling": (_tool("Fails."), _fail),
    "test_tool_with_progress": (_tool("Tells its progress."), _progress),
    "test_reconnection": (_tool("Takes a while."), _slow),
    "test_sampling": (_asking("Asks the client's model.", "prompt"), _sample),
    "test_elicitation": (_asking("Asks the user.", "message"), _elicit(_PERSON)),
    "test_streaming_elicitation": (_tool("Asks the user."), _elicit(_PERSON)),
    "test_elicitation_sep1034_defaults": (_tool("Asks the user, with defaults."), _elicit(_DEFAULTS)),
    "test_elicitation_sep1330_enums": (_tool("Asks the user to choose."), _elicit(_ENUMS)),
    "test_input_required_result_elicitation": (_tool("Asks the user for a name."), _elicit(_wants("name", "string"))),
    "test_input_required_result_request_state": (_tool("Asks the user to agree."), _elicit(_wants("ok", "boolean"))),
    "test_input_required_result_tampered_state": (_tool("Asks the user to agree."), _elicit(_wants("ok", "boolean"))),
    "test_input_required_result_multi_round": (
        _tool("Asks the user for a name, then for a colour."),
        _elicit(_wants("name", "string"), _wants("color", "string")),
    ),
    "test_input_required_result_sampling": (_tool("Asks the client's model."), _sample),
    "test_input_required_result_capabilities": (_tool("Asks the client's model."), _sample),
    "test_input_required_result_list_roots": (_tool("Asks for the client's folders."), _roots),
    "test_input_required_result_multiple_inputs": (_tool("Asks the client for its folders."), _roots),
    "test_header_from_argument": (_tool("Wants an argument as a header.", _HEADER), _says(_text("ok"))),
    "json_schema_2020_12_tool": (_tool("Has a schema of the draft 2020-12.", _2020_12), _says(_text("ok"))),
}


if __name__ == "__main__":
    Server().run()
