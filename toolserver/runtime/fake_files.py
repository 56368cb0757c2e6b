"""The file methods of the worker extension over a FakeWorkspace."""

from __future__ import annotations

import base64
import itertools
from dataclasses import dataclass
from typing import Any

from toolserver.runtime.fake_workspace import FakeWorkspace, Refused


@dataclass
class _Handle:
    mode: str
    path: str | None  # None: the whole tree, as an archive
    data: bytearray


class FakeFiles:
    def __init__(self, workspace: FakeWorkspace) -> None:
        self._workspace = workspace
        self._handles: dict[int, _Handle] = {}
        self._numbers = itertools.count(1)

    def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused, and LookupError for an unknown method."""
        match method:
            case "file.stat":
                return self._workspace.stat(params["path"])
            case "file.list":
                return self._workspace.list(params["path"], params["limit"])
            case "file.delete":
                self._workspace.delete(params["path"])
                return {}
            case "file.open":
                return self._open(params["mode"], params["path"])
            case "archive.open":
                return self._open(params["mode"], None)
            case "file.read":
                data = bytes(self._handle(params).data)
                piece = data[params["offset"] : params["offset"] + params["length"]]
                end = params["offset"] + len(piece) >= len(data)
                return {"data": base64.b64encode(piece).decode(), "eof": end}
            case "file.write":
                self._handle(params).data += base64.b64decode(params["data"])
                return {}
            case "file.close":
                return self._close(params)
        raise LookupError(method)

    def _open(self, mode: str, path: str | None) -> dict[str, Any]:
        data = bytearray()
        if mode == "r":
            data += self._workspace.pack() if path is None else self._workspace.read(path)
        elif path is not None and self._workspace.kind(self._workspace.clean(path)) == "dir":
            raise Refused("is_directory", f"{path} is a folder.")
        number = next(self._numbers)
        self._handles[number] = _Handle(mode, path, data)
        return {"handle": number, "bytes": len(data)}

    def _handle(self, params: dict[str, Any]) -> _Handle:
        found = self._handles.get(params["handle"])
        if found is None:
            raise Refused("bad_handle", "There is no such handle.")
        return found

    def _close(self, params: dict[str, Any]) -> dict[str, Any]:
        handle = self._handle(params)
        del self._handles[params["handle"]]
        if handle.mode == "w" and params.get("commit"):
            if handle.path is None:
                return {"files": self._workspace.unpack(bytes(handle.data))}
            self._workspace.write(handle.path, bytes(handle.data))
        return {}
