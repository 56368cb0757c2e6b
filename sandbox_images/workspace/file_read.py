"""file_read: a text file or some of its lines, bounded; binary files are named, not shown."""

from __future__ import annotations

import os
from collections.abc import Generator

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import explain
from sandbox_images.base.byte_text import readable
from sandbox_images.workspace.calls import Call, Ending, ToolFailure
from sandbox_images.workspace.file_store import FileStore
from sandbox_images.workspace.file_tools import path_argument, said

STEP_BYTES, PROBE_BYTES = 128 << 10, 8192
MAX_SCANNED_BYTES = 256 << 20  # how far into a file lines are counted


class Window:
    """Collects the wanted lines out of chunks, up to a number of bytes, and counts all lines."""

    def __init__(self, first: int, last: int | None, room: int) -> None:
        self._first, self._last, self._room = first, last, room
        self.line, self.kept, self.cut = 1, bytearray(), False
        self.last_shown = first - 1
        self.ends_open = False  # the last line has no newline

    def feed(self, data: bytes) -> None:
        for part in _lines(data):
            wanted = self._first <= self.line and (self._last is None or self.line <= self._last)
            if wanted and not self.cut:
                room = self._room - len(self.kept)
                self.kept += part[:room]
                self.cut = len(part) > room
                if room > 0:
                    self.last_shown = self.line
            self.ends_open = not part.endswith(b"\n")
            if not self.ends_open:
                self.line += 1

    def count(self) -> int:
        return self.line if self.ends_open else self.line - 1


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines alone: a bare carriage return ends no line."""
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


class FileRead:
    def __init__(self, store: FileStore) -> None:
        self._store = store

    def read(self, call: Call) -> Generator[None, None, Ending]:
        path = path_argument(call)
        first, last = int(call.arguments.get("start_line") or 1), call.arguments.get("end_line")
        if last is not None and last < first:
            raise ToolFailure("end_line is before start_line.", "invalid", "/end_line")
        fd, info = self._store.workspace.open_regular(path)
        window, scanned, whole = Window(first, last, call.max_text), 0, True
        try:
            while data := os.read(fd, STEP_BYTES):
                if scanned == 0 and b"\x00" in data[:PROBE_BYTES]:
                    return _binary(path, info.st_size)
                window.feed(data)
                scanned += len(data)
                if scanned > MAX_SCANNED_BYTES:
                    whole = False
                    break
                yield
        except OSError as problem:
            raise explain(problem, path) from problem
        finally:
            os.close(fd)
        return _ending(path, info.st_size, window, first, whole=whole)


def _binary(path: str, size: int) -> Ending:
    text = f"[{path} is a binary file of {size} bytes: it is not shown. Use python_execute to look into it.]"
    return Ending(content=said(text), structured={"path": path, "binary": True, "bytes": size})


def _ending(path: str, size: int, window: Window, first: int, *, whole: bool) -> Ending:
    text, exact = readable(bytes(window.kept))
    total = window.count()
    facts: dict[str, Any] = {
        "path": path, "text": text, "start_line": first, "end_line": window.last_shown, "total_lines": total if whole else None,
        "bytes": size, "truncated": window.cut or not whole,
    }  # fmt: skip
    if not exact:
        facts["escaped"] = True
    content = said(text) if text else []
    lines = f"{total}" if whole else f"more than {total}"
    if window.cut:
        content += said(
            f"[cut in line {window.last_shown} of {lines}: go on with start_line={max(first + 1, window.last_shown)}]"
        )
    elif window.last_shown < first and size:
        content += said(f"[there is no line {first}: {path} has {lines} lines]")
    elif window.last_shown < total:
        content += said(f"[lines {first} to {window.last_shown} of {lines}]")
    elif not size:
        content += said(f"[{path} is empty]")
    return Ending(content=content, structured=facts)
