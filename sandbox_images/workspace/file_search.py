"""file_search: regular expressions over names and lines, in a helper that can be killed when an expression runs away."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator

from sandbox_images.base.annotations import Any
from sandbox_images.base.beneath import FOLDER, explain
from sandbox_images.base.event_loop import Loop
from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.base.path_text import spell
from sandbox_images.workspace.calls import STOPPED, Call, Calls, Ending, ToolFailure
from sandbox_images.workspace.family import Family
from sandbox_images.workspace.file_store import FileStore
from sandbox_images.workspace.file_tools import path_argument, said
from sandbox_images.workspace.helper_process import Helper
from sandbox_images.workspace.shell_tools import no_process
from sandbox_images.workspace.workspace_scan import OWN_FOLDER

MAX_SECONDS = 20.0
MAX_LINE_CHARS, MAX_FILE_BYTES, PROBE_BYTES = 400, 64 << 20, 8192
SKIPPED_FOLDERS = (OWN_FOLDER, ".git")


class FileSearch:
    def __init__(self, loop: Loop, calls: Calls, family: Family, store: FileStore) -> None:
        self._loop, self._calls, self._family, self._store = loop, calls, family, store

    def search(self, call: Call) -> None:
        """The handler of file_search."""
        path = path_argument(call, default=".")
        arguments = call.arguments
        try:
            pattern = re.compile(arguments["pattern"], re.IGNORECASE if arguments.get("ignore_case") else 0)
        except (re.error, OverflowError, RecursionError) as problem:
            raise ToolFailure(f"The pattern is no regular expression: {problem}.", "invalid", "/pattern") from problem
        self._check(path)
        search = Search(self._store, path, pattern, arguments.get("glob"), int(arguments.get("limit") or 200))
        stopped: list[str] = []

        def on_end(report: dict[str, Any] | None) -> None:
            timer.cancel()
            helper.close()
            self._calls.finish(call, _ending(call, report, stopped))

        def stop(end: str) -> None:
            stopped.append(end)
            helper.kill()

        try:
            helper = Helper(self._loop, self._family, lambda _in, _out: search.run(), on_end)
        except OSError as problem:
            raise ToolFailure(no_process(problem)) from problem
        timer = self._loop.call_later(MAX_SECONDS, lambda: stop("pattern"))
        call.stop = stop

    def _check(self, path: str) -> None:
        """Raises ProtocolError when there is nothing to search."""
        try:
            os.close(self._store.workspace.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as problem:
            raise explain(problem, path) from problem


def _ending(call: Call, report: dict[str, Any] | None, stopped: list[str]) -> Ending:
    if report is None:
        end = stopped[0] if stopped else "failed"
        if end == "pattern":
            return Ending(
                "failed",
                f"The search was stopped after {MAX_SECONDS:.0f} s: simplify the pattern, or search fewer files with path or glob.",
            )
        return Ending(end, STOPPED.get(end, "The search was ended from outside. Try again."))
    lines = [_line(match) for match in report["matches"]]
    text, size = [], 0
    for line in lines:
        size += len(line.encode("utf-8", "replace")) + 1
        if size > call.max_text:
            break
        text.append(line)
    more = report["more"] or len(text) < len(lines)
    if more:
        text.append("[there are more matches: narrow the search with path or glob]")
    if report["skipped"]:
        text.append(f"[{report['skipped']} files were too large or unreadable and were not searched]")
    if not lines:
        text.append(f"[no match in {report['files']} files]")
    facts = {"matches": report["matches"][: len(text)], "files_searched": report["files"], "truncated": more}
    return Ending(content=said("\n".join(text)), structured=facts)


def _line(match: dict[str, Any]) -> str:
    return f"{match['path']}:{match['line']}: {match['text']}" if "line" in match else f"{match['path']}"


class Search:
    """What the helper does."""

    def __init__(self, store: FileStore, path: str, pattern: re.Pattern[str], glob: str | None, limit: int) -> None:
        self._workspace, self._path, self._pattern, self._glob, self._limit = (
            store.workspace,
            path,
            pattern,
            glob,
            limit,
        )
        self._matches: list[dict[str, Any]] = []
        self._files, self._skipped = 0, 0

    def run(self) -> dict[str, Any]:
        for path in self._paths():
            self._files += 1
            self._look_into(path)
            if len(self._matches) > self._limit:
                break
        more = len(self._matches) > self._limit
        return {"matches": self._matches[: self._limit], "more": more, "files": self._files, "skipped": self._skipped}

    def _paths(self) -> Iterator[str]:
        """Files in order of their paths; no symbolic link to a folder is followed."""
        try:
            fd = self._workspace.open(self._path, FOLDER)
        except OSError:
            yield self._path
            return
        os.close(fd)
        folders = [self._path]
        while folders:
            folder = folders.pop()
            below = []
            try:
                fd = self._workspace.open(folder, FOLDER)
            except OSError:
                continue
            with os.scandir(fd) as entries:
                found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
            os.close(fd)
            for name, is_folder in found:
                path = name if folder == "." else f"{folder}/{name}"
                if is_folder:
                    if name not in SKIPPED_FOLDERS:
                        below.append(path)
                elif self._glob is None or fnmatch.fnmatch(name, self._glob) or fnmatch.fnmatch(path, self._glob):
                    yield path
            folders += below[::-1]

    def _look_into(self, path: str) -> None:
        shown = spell(path)
        if self._pattern.search(path.rpartition("/")[2]):
            self._matches.append({"path": shown})
        try:
            fd, info = self._workspace.open_regular(path)
        except ProtocolError:
            return
        try:
            if info.st_size > MAX_FILE_BYTES or not stat.S_ISREG(info.st_mode):
                self._skipped += 1
                return
            with open(fd, "rb", closefd=False) as file:
                data = file.read()
        except OSError:
            self._skipped += 1
            return
        finally:
            os.close(fd)
        if b"\x00" in data[:PROBE_BYTES]:
            return
        for number, line in enumerate(data.decode("utf-8", "backslashreplace").split("\n"), 1):
            if self._pattern.search(line):
                text = line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..."
                self._matches.append({"path": shown, "line": number, "text": text.rstrip("\r")})
                if len(self._matches) > self._limit:
                    return
