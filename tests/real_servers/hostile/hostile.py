"""An MCP server that does to its client what it is told to, by the argument of a call or by its environment. Standard library only."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from typing import Any

MODE = os.environ.get("MODE", "")
TEXT = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {"name": "ok", "description": "Says ok.", "inputSchema": {"type": "object"}},
    {
        "name": "do",
        "description": "Does it.",
        "inputSchema": {"type": "object", "properties": {"what": TEXT}, "required": ["what"]},
    },
    {
        "name": "promise",
        "description": "Gives something else than it promises.",
        "inputSchema": {"type": "object"},
        "outputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    },
]
answers: dict[Any, dict[str, Any]] = {}  # of the client, by the id of what was asked
writing = threading.Lock()


def raw(data: bytes) -> None:
    written = 0
    with writing:
        while written < len(data):
            written += os.write(1, data[written : written + 65_536])


def say(message: Any) -> None:
    raw(json.dumps(message).encode() + b"\n")


def result(number: Any, text: str = "done") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": text}]}}


def note(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": params}


def ask(name: str, method: str, **params: Any) -> str:
    say({"jsonrpc": "2.0", "id": name, "method": method, "params": params})
    for _ in range(500):
        if name in answers:
            return json.dumps(answers[name].get("result", answers[name].get("error")))
        time.sleep(0.02)
    return "nobody answered"


def do(what: str, number: Any, token: Any) -> None:
    """In a thread of its own."""
    match what:
        case "noise":
            for count in range(300):
                raw(f"INFO {count} something happened\n".encode())
        case "garbage":
            raw(b"\xff\xfe\x00 no text at all\n{\n[]\nnull\n42\nNaN\n{}\n\n   \n[1, [2]]\n" + b"[" * 50_000 + b"\n")
            say({"jsonrpc": "1.0", "id": number, "result": {}})
            say({"jsonrpc": "2.0", "id": [number], "method": {"a": 1}})
        case "bom":
            raw(b"\xef\xbb\xbf" + json.dumps(result(number, "with a mark")).encode() + b"\r\n")
            return
        case "pieces":
            line = json.dumps(result(number, "in pieces")).encode() + b"\n"
            for at in range(0, len(line), 7):
                raw(line[at : at + 7])
                time.sleep(0.01)
            return
        case "batch":
            say([note("notifications/message", level="info", data="x"), result(number, "one of several")])
            return
        case "wrong ids":
            for wrong in (number + 1, -1, str(number), None, 1e300, True, [number]):
                say(result(wrong, "for nobody"))
        case "twice":
            say(result(number, "first"))
            say(result(number, "second"))
            return
        case "large":
            say(result(number, "x" * 3_000_000))
            return
        case "giant":
            say(result(number, "x" * 20_000_000))
            return
        case "many blocks":
            blocks = [{"type": "text", "text": "b"}] * 3_000
            say({"jsonrpc": "2.0", "id": number, "result": {"content": blocks}})
            return
        case "no result":
            say({"jsonrpc": "2.0", "id": number, "result": ["nothing"]})
            return
        case "no content":
            say({"jsonrpc": "2.0", "id": number, "result": {"content": {"type": "text"}}})
            return
        case "half":
            raw(json.dumps(result(number)).encode()[:-5])
            os._exit(3)
        case "die":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "flood of noise":
            while True:
                raw(b"x" * 1000 + b"\n")
        case "endless line":
            while True:
                raw(b"x" * 65_536)
        case "silence":
            return
        case "close":
            os.close(1)
            return
        case "progress":
            for step in itertools.count():
                say(note("notifications/progress", progressToken=token, progress=step, total=step + 1))
                time.sleep(0.005)
        case "bad progress":
            for params in (
                {},
                {"progressToken": token},
                {"progressToken": token, "progress": "much", "message": ["x"]},
            ):
                say(note("notifications/progress", **params))
        case "bad questions":
            schema = {"type": "object", "properties": {"a": {"$ref": "http://elsewhere.example/schema"}}}
            asked = [
                ask("q1", "elicitation/create", message="?", requestedSchema=schema),
                ask("q2", "elicitation/create", message="?", mode="url", url="javascript:alert(1)"),
                ask("q3", "elicitation/create", mode="form"),
                ask("q4", "sampling/createMessage", messages=[], maxTokens=1),
                ask("q5", "roots/list"),
                ask("q6", "made/up"),
                ask("q7", "ping"),
            ]
            say(result(number, "\n".join(asked)))
            return
        case "flood of requests":
            for request in range(5_000):
                say({"jsonrpc": "2.0", "id": f"f{request}", "method": "sampling/createMessage", "params": {}})
        case "storm":
            for _ in range(20_000):
                say(note("notifications/tools/list_changed"))
        case "forks":
            made: list[int] = []
            try:
                while len(made) < 5_000:
                    made.append(os.fork())
                    if made[-1] == 0:
                        time.sleep(600)
                        os._exit(0)
            except OSError as no:
                say(result(number, f"{no.strerror} after {'some' if made else 'no'} forks"))
            return
        case "fill":
            try:
                for index in itertools.count():
                    with open(f"/tmp/{index}", "wb", buffering=0) as file:  # noqa: PTH123 - as little as possible
                        for _ in range(8):
                            file.write(b"x" * (1 << 20))
            except OSError as no:
                say(result(number, str(no.strerror)))
            return
        case "memory":
            kept: list[bytes] = []
            while True:
                kept.append(b"x" * (8 << 20))
        case "stderr":
            for _ in range(300):
                os.write(2, b"e" * 99_999 + b"\n")
    say(result(number))


def tools_page(cursor: str | None) -> dict[str, Any]:
    if MODE == "pages without end":
        return {"tools": TOOLS[:1], "nextCursor": str(int(cursor or 0) + 1)}
    if MODE == "pages in a circle":
        return {"tools": TOOLS, "nextCursor": "b" if cursor == "a" else "a"}
    if MODE == "ten thousand tools":
        return {"tools": [{**TOOLS[0], "name": f"t{number}"} for number in range(10_000)]}
    return {"tools": TOOLS}


def take(message: dict[str, Any]) -> None:
    number, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if method is None:
        answers[number] = message
    elif method == "initialize":
        told = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {"listChanged": True}}}
        say({"jsonrpc": "2.0", "id": number, "result": {**told, "serverInfo": {"name": "hostile", "version": "1"}}})
    elif method == "tools/list":
        say({"jsonrpc": "2.0", "id": number, "result": tools_page(params.get("cursor"))})
    elif method == "tools/call" and params["name"] == "ok":
        say(result(number, "ok"))
    elif method == "tools/call" and params["name"] == "promise":
        structured = {"content": [{"type": "text", "text": "n"}], "structuredContent": {"n": "many"}}
        say({"jsonrpc": "2.0", "id": number, "result": structured})
    elif method == "tools/call":
        token = (params.get("_meta") or {}).get("progressToken")
        threading.Thread(target=do, args=(params["arguments"]["what"], number, token), daemon=True).start()
    elif number is not None:
        say({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no such method"}})


if MODE == "banner":
    raw(b"Welcome!\n\n  * listening on stdio\n")
if MODE == "dies":
    sys.exit(9)
if MODE != "deaf":
    for line in sys.stdin.buffer:
        take(json.loads(line))
while True:  # whatever becomes of its input
    time.sleep(60)
