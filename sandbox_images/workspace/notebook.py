"""notebook_export: every cell of the session, with its outputs, as nbformat 4."""

from __future__ import annotations

import json
import sys
import zlib
from collections import deque

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import clean
from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.workspace.calls import Call, Ending, ToolFailure
from sandbox_images.workspace.file_store import FileStore

MAX_KEPT_BYTES = 4 << 20  # compressed; beyond it the oldest outputs go
SMALL_BYTES = 1024  # a cell below it is kept as it is
DEFAULT_PATH = "session.ipynb"


class Notebook:
    """Cells are kept compressed: source and outputs, oldest first."""

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._cells: deque[bytes] = deque()
        self._bytes, self._dropped = 0, 0

    def add(self, code: str, number: int, call: Call, ending: Ending, shown: list[tuple[str, str, str]]) -> None:
        """Remember a call that has ended. `shown`: what RichOutput kept for the notebook."""
        texts = call.output.texts()[0] if call.output is not None else {}
        outputs: list[dict[str, Any]] = [
            {"output_type": "stream", "name": name, "text": texts[name]}
            for name in ("stdout", "stderr")
            if texts.get(name)
        ]
        result: dict[str, str] = {"text/plain": texts["result"]} if texts.get("result") else {}
        for where, mime, text in shown:
            if where == "result":
                result[mime] = text
            elif where == "error":
                outputs.append(_error(mime, text))
            else:
                outputs.append({"output_type": "display_data", "data": {mime: text}, "metadata": {}})
        if result:
            outputs.append({"output_type": "execute_result", "execution_count": number, "data": result, "metadata": {}})
        if ending.end != "done" and not any(output["output_type"] == "error" for output in outputs):
            outputs.append(_error(ending.end, json.dumps([ending.message, ending.message])))
        self._keep(_code_cell(code, number, outputs))

    def add_reset(self) -> None:
        self._keep({"cell_type": "markdown", "metadata": {}, "source": "*The interpreter was restarted here.*"})

    def _keep(self, cell: dict[str, Any]) -> None:
        packed = json.dumps(cell).encode()
        if len(packed) > SMALL_BYTES:
            packed = zlib.compress(packed, 1)
        self._cells.append(packed)
        self._bytes += len(packed)
        while self._bytes > MAX_KEPT_BYTES and len(self._cells) > 1:
            self._bytes -= len(self._cells.popleft())
            self._dropped += 1

    def export(self, call: Call) -> Any:
        """The handler of notebook_export."""
        path = clean(call.arguments.get("path") or DEFAULT_PATH)
        if not path.endswith(".ipynb"):
            raise ToolFailure("The path of a notebook must end in .ipynb.", "invalid", "/path")
        cells = [json.loads(packed if packed.startswith(b"{") else zlib.decompress(packed)) for packed in self._cells]
        if self._dropped:
            text = f"*The first {self._dropped} cells of the session were too large to keep.*"
            cells.insert(0, {"cell_type": "markdown", "metadata": {}, "source": text})
        for number, cell in enumerate(cells):
            cell["id"] = f"cell-{number}"
        text = json.dumps(_book(cells), indent=1, ensure_ascii=True) + "\n"
        try:
            size = self._files.write(path, text.encode())
        except ProtocolError as problem:
            raise ToolFailure(
                problem.message, "disk_full" if problem.kind in ("too_large", "disk_full") else "failed"
            ) from problem
        call.artifacts.append({"path": path, "bytes": size, "media_type": "application/x-ipynb+json"})
        said = f"{len(cells)} cells written to {path}."
        return Ending(
            content=[{"type": "text", "text": said}], structured={"path": path, "cells": len(cells), "bytes": size}
        )
        yield  # a handler is a generator


def _code_cell(code: str, number: int, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"cell_type": "code", "execution_count": number, "metadata": {}, "source": code, "outputs": outputs}


def _error(name: str, details: str) -> dict[str, Any]:
    message, text = json.loads(details)
    return {"output_type": "error", "ename": name, "evalue": str(message), "traceback": str(text).split("\n")}


def _book(cells: list[dict[str, Any]]) -> dict[str, Any]:
    version = ".".join(map(str, sys.version_info[:3]))
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {
                "name": "python",
                "version": version,
                "file_extension": ".py",
                "mimetype": "text/x-python",
            },
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
