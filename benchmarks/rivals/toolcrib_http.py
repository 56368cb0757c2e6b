"""Toolcrib itself, over HTTP, by http.client."""

from __future__ import annotations

from typing import Any

import docker
from server import Server


class Rival:
    def __init__(self, _image: str) -> None:
        self._server = Server()
        self._server.__enter__()

    def create(self) -> dict[str, Any]:
        return self._server.create()

    def run(self, handle: dict[str, Any], code: str) -> str:
        return str(self._server.python(handle["id"], code)["content"])

    def close(self, handle: dict[str, Any]) -> None:
        self._server.close(handle["id"])

    def container(self, handle: dict[str, Any]) -> str | None:
        label = f"toolcrib.sandbox={handle['sandboxes'][0]['sandbox_id']}"
        return str(docker.from_env().containers.list(filters={"label": label})[0].id)

    def finish(self) -> None:
        self._server.__exit__(None, None, None)
