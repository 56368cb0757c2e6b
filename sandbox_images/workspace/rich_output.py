"""What an interpreter shows beside its streams, turned into content blocks, structured content and artifacts."""

from __future__ import annotations

import base64
import json

from sandbox_images.base.annotations import Any
from sandbox_images.base.byte_text import readable
from sandbox_images.workspace.artifacts import Artifacts
from sandbox_images.workspace.calls import Call, Ending

TABLE = "application/vnd.toolcrib.table+json"
PICTURES = ("image/png", "image/jpeg")
DOCUMENTS = ("text/html", "image/svg+xml")
MAX_PICTURE_BYTES, MAX_DOCUMENT_BYTES, MAX_TABLE_BYTES = 1 << 20, 64 << 10, 256 << 10
MAX_INLINE_BYTES, MAX_SHOWN = 3 << 20, 100  # of a call


class RichOutput:
    def __init__(self, call: Call, artifacts: Artifacts, cell: int) -> None:
        self._call, self._artifacts, self._cell = call, artifacts, cell
        self._inline, self._shown = 0, 0
        self.structured: dict[str, Any] = {}
        self.outputs: list[tuple[str, str, str]] = []  # (where, media type, text or base64), for the notebook

    def add(self, mime: str, data: bytes, where: str) -> None:
        """Take one value that the code has shown."""
        self._shown += 1
        if self._shown > MAX_SHOWN:
            if self._shown == MAX_SHOWN + 1:
                self._text(f"[more than {MAX_SHOWN} values were shown: the rest is left out]")
            return
        if mime == TABLE:
            self._table(data)
        elif mime in PICTURES:
            self._picture(mime, data, where)
        elif mime in DOCUMENTS:
            self._document(mime, data, where)
        else:
            text = readable(data[:MAX_DOCUMENT_BYTES])[0]
            self._text(text)
            self.outputs.append((where, "text/plain", text))

    def _text(self, text: str) -> None:
        self._call.displays.append({"type": "text", "text": text})

    def _table(self, data: bytes) -> None:
        if len(data) > MAX_TABLE_BYTES or self._inline + len(data) > MAX_INLINE_BYTES:
            self._save("application/json", data)
            return
        try:
            table = json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return
        self._inline += len(data)
        self.structured.setdefault("tables", []).append(table)

    def _picture(self, mime: str, data: bytes, where: str) -> None:
        if len(data) > MAX_PICTURE_BYTES or self._inline + len(data) > MAX_INLINE_BYTES:
            self._save(mime, data)
            return
        self._inline += len(data)
        text = base64.b64encode(data).decode()
        self._call.displays.append({"type": "image", "data": text, "mimeType": mime})
        self.outputs.append((where, mime, text))

    def _document(self, mime: str, data: bytes, where: str) -> None:
        if len(data) > MAX_DOCUMENT_BYTES or self._inline + len(data) > MAX_INLINE_BYTES:
            self._save(mime, data)
            return
        self._inline += len(data)
        text = readable(data)[0]
        uri = f"display://cell-{self._cell}/{self._shown}"
        self._call.displays.append({"type": "resource", "resource": {"uri": uri, "mimeType": mime, "text": text}})
        self.outputs.append((where, mime, text))

    def _save(self, mime: str, data: bytes) -> None:
        """Too large to be shown: it becomes a file of the workspace."""
        artifact = self._artifacts.save(f"{self._call.call_id}-{self._shown}", mime, data)
        if artifact is None:
            self._text(f"[{mime} of {len(data)} bytes: too large to show, and the disk has no room for it]")
            return
        self._call.artifacts.append(artifact)
        self._text(f"[{mime} of {len(data)} bytes is in {artifact['path']}]")

    def ending(self, done: dict[str, Any]) -> Ending:
        """The ending that a `done` frame says. Its fields come from where user code runs: types are not trusted."""
        status, result = done.get("status"), done.get("result")
        output = self._call.output
        if isinstance(result, str) and result and output is not None:
            output.feed(output.result, result.encode("utf-8", "backslashreplace"))
        if status == "ok":
            return Ending(structured=self.structured)
        if status == "exit":
            return self._exit(done.get("code"))
        if status == "error" and isinstance(done.get("error"), dict):
            return self._error(done["error"], full=done.get("disk_full") is True)
        return Ending("failed", "The code was interrupted.", structured=self.structured)

    def _exit(self, code: object) -> Ending:
        number = code if isinstance(code, int) else 1
        facts = self.structured | {"exit_code": number}
        if number == 0:
            return Ending(
                structured=facts,
                exit_code=0,
                notes=["The code ended itself with exit code 0; the interpreter and its state are kept."],
            )
        message = f"The code ended itself with exit code {number} (SystemExit). The interpreter and its state are kept."
        return Ending("failed", message, structured=facts, exit_code=number)

    def _error(self, error: dict[str, Any], *, full: bool) -> Ending:
        kind, message = str(error.get("type"))[:200], str(error.get("message"))[:2000]
        text = str(error.get("traceback"))[:20_000]
        self.outputs.append(("error", kind, json.dumps([message, text])))
        facts = self.structured | {
            "error": {"type": kind, "message": message, "line": error.get("line"), "traceback": text}
        }
        summary = f"{kind}: {message}"[:300] if message else kind
        content = [{"type": "text", "text": text}]
        if full:
            return Ending(
                "disk_full",
                f"The disk is full: {summary}. Delete files, then try again.",
                structured=facts,
                content=content,
            )
        return Ending("failed", summary, structured=facts, content=content)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
