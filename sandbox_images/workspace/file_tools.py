"""file_write, file_edit, file_list, file_move, file_delete. Each handler is a generator that returns its Ending."""

from __future__ import annotations

from collections.abc import Generator

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import clean
from sandbox_images.base.event_loop import Clock
from sandbox_images.base.mcp_stdio import ProtocolError, refused
from sandbox_images.workspace.calls import Call, Ending, ToolFailure, refusal
from sandbox_images.workspace.file_store import FileStore

MAX_EDIT_BYTES = 32 << 20
MAX_PLACES = 20
MAX_NEAR_LINES = 20_000
Handler = Generator[None, None, Ending]


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def path_argument(call: Call, name: str = "path", default: str | None = None) -> str:
    """The clean path of an argument. Raises ToolFailure `invalid` that points to it."""
    try:
        return clean(call.arguments.get(name) or default)
    except ProtocolError as problem:
        raise ToolFailure(problem.message, "invalid", f"/{name}") from problem


def encoded(call: Call, name: str) -> bytes:
    try:
        return str(call.arguments[name]).encode()
    except UnicodeEncodeError:
        raise ToolFailure("The text holds a lone surrogate, which UTF-8 can't say.", "invalid", f"/{name}") from None


class FileTools:
    def __init__(self, store: FileStore) -> None:
        self._store = store

    def write(self, call: Call) -> Handler:
        path, data = path_argument(call), encoded(call, "content")
        if call.arguments.get("append"):
            try:
                data = self._store.read(path, MAX_EDIT_BYTES) + data
            except ProtocolError as problem:
                if problem.kind != "not_found":
                    raise
        size = self._store.write(path, data)
        return Ending(content=said(f"{path} written, {size} bytes."), structured={"path": path, "bytes": size})
        yield  # a handler is a generator

    def edit(self, call: Call) -> Handler:
        path, old, new = path_argument(call), encoded(call, "old_string"), encoded(call, "new_string")
        data = self._store.read(path, MAX_EDIT_BYTES)
        count = data.count(old)
        if count == 0:
            hint = yield from _nearest(data, old)
            raise ToolFailure(f"{path}: the text to replace does not occur, nothing was changed.{hint}")
        if data.find(old) != data.rfind(old) and not call.arguments.get("replace_all"):
            if count == 1:
                raise ToolFailure(
                    f"{path}: the text to replace occurs in places that overlap, so it is not clear which one is meant; "
                    "nothing was changed. Give more of the text around it."
                )
            lines, more = _places(data, old)
            shown = ", ".join(map(str, lines)) + (" and more" if more else "")
            raise ToolFailure(
                f"{path}: the text to replace occurs {count} times, at lines {shown}; nothing was changed. "
                "Give more of the text around the one you mean, or replace_all."
            )
        lines, _ = _places(data, old)
        self._store.write(path, data.replace(old, new))
        text = f"{path}: {count} place{'s' if count > 1 else ''} changed, at line {', '.join(map(str, lines))}."
        return Ending(content=said(text), structured={"path": path, "replaced": count, "lines": lines})

    def list(self, call: Call) -> Handler:
        path = path_argument(call, default=".")
        limit = int(call.arguments.get("limit") or 1000)
        entries, more = yield from self._store.listing(path, limit, recursive=bool(call.arguments.get("recursive")))
        lines = [_line(entry) for entry in entries]
        text, shown = [], 0
        for line in lines:
            shown += len(line) + 1
            if shown > call.max_text:
                break
            text.append(line)
        left_out = len(lines) - len(text)
        if left_out or more:
            text.append(
                f"[{left_out or ''}{' ' if left_out else ''}more entries are left out: list a folder below, or raise limit]"
            )
        if not lines:
            text.append(f"[{path} is empty]")
        kept = [{key: entry[key] for key in ("name", "kind", "bytes")} for entry in entries[: len(lines) - left_out]]
        facts = {"path": path, "entries": kept, "truncated": more or bool(left_out)}
        return Ending(content=said("\n".join(text)), structured=facts)

    def move(self, call: Call) -> Handler:
        source, destination = path_argument(call, "source"), path_argument(call, "destination")
        try:
            self._store.move(source, destination, overwrite=bool(call.arguments.get("overwrite")))
        except ProtocolError as problem:
            pointer = "/destination" if problem.kind == "exists" else "/source"
            return refusal(problem, pointer)
        facts = {"source": source, "destination": destination}
        return Ending(content=said(f"{source} is now {destination}."), structured=facts)
        yield  # a handler is a generator

    def delete(self, call: Call) -> Handler:
        path = path_argument(call)
        try:
            yield from self._store.delete(path, recursive=bool(call.arguments.get("recursive")))
        except ProtocolError as problem:
            if problem.kind == "exists":
                raise refused(
                    "exists", f"{path} is a folder that is not empty: give recursive to delete all of it."
                ) from problem
            raise
        return Ending(content=said(f"{path} deleted."), structured={"path": path})


def _line(entry: dict[str, Any]) -> str:
    mark = {"dir": "/", "symlink": "@", "other": "?"}.get(entry["kind"], "")
    size = f"{entry['bytes']:>12}" if entry["kind"] == "file" else " " * 12
    return f"{size}  {entry['name']}{mark}"


def _places(data: bytes, text: bytes) -> tuple[list[int], bool]:
    """(line numbers where `text` begins, whether there are more than are named)."""
    lines: list[int] = []
    at, line, counted = data.find(text), 1, 0
    while at >= 0:
        if len(lines) == MAX_PLACES:
            return lines, True
        line += data.count(b"\n", counted, at)
        counted = at
        lines.append(line)
        at = data.find(text, at + len(text))
    return lines, False


def _nearest(data: bytes, text: bytes) -> Generator[None, None, str]:
    """A hint at what comes nearest to a text that does not occur: the same but for white space, else the most alike line."""
    import difflib  # noqa: PLC0415 - seldom needed, and every sandbox pays for what the worker holds

    lines = data.decode("utf-8", "replace").split("\n")[:MAX_NEAR_LINES]
    wanted = [line for line in text.decode().split("\n") if line.strip()]
    if not wanted:
        return ""
    squeezed = ["".join(line.split()) for line in lines]
    first = "".join(wanted[0].split())
    for number, line in enumerate(squeezed, 1):
        if line and (line == first or (len(first) > 3 and first in line)):
            return f" Line {number} is the same but for white space or line ends: {lines[number - 1][:200]!r}."
    matcher, clock = difflib.SequenceMatcher(None, autojunk=False), Clock()
    matcher.set_seq2(wanted[0].strip()[:300])
    best, place = 0.6, 0
    for number, line in enumerate(lines, 1):
        matcher.set_seq1(line.strip()[:300])
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best and (ratio := matcher.ratio()) > best:
            best, place = ratio, number
        if clock.spent():
            yield
            clock.start()
    return f" The nearest is line {place}: {lines[place - 1][:200]!r}." if place else " No line is like it."
