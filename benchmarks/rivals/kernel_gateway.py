"""Jupyter Kernel Gateway in a container, with the leanest client: one websocket kept open for each kernel."""

from __future__ import annotations

import json
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

import docker
import requests
import websocket

UP_S = 180  # eight at a time on a busy machine
COMMAND = ["jupyter", "kernelgateway", "--KernelGatewayApp.ip=0.0.0.0", "--KernelGatewayApp.port=8888"]


@dataclass
class Kernel:
    container: Any
    channel: websocket.WebSocket


class Rival:
    def __init__(self, image: str) -> None:
        self._image, self._engine = image, docker.from_env()

    def create(self) -> Kernel:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        container = self._engine.containers.run(
            self._image, COMMAND, detach=True, ports={"8888/tcp": ("127.0.0.1", port)}, user="root"
        )
        try:
            return Kernel(container, self._connect(f"127.0.0.1:{port}"))
        except BaseException:
            container.remove(force=True)
            raise

    def _connect(self, address: str) -> websocket.WebSocket:
        until = time.monotonic() + UP_S
        while True:
            try:
                answer = requests.post(f"http://{address}/api/kernels", json={"name": "python3"}, timeout=30)
                answer.raise_for_status()
                break
            except requests.RequestException:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        return websocket.create_connection(f"ws://{address}/api/kernels/{answer.json()['id']}/channels", timeout=60)

    def run(self, handle: Kernel, code: str) -> str:
        number = uuid.uuid4().hex
        header = {"msg_id": number, "username": "", "session": "s", "msg_type": "execute_request", "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        message = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "content": content}
        handle.channel.send(json.dumps(message))
        said, waited_for = "", {"execute_reply", "idle"}
        while waited_for:
            got = json.loads(handle.channel.recv())
            if got["parent_header"].get("msg_id") != number:
                continue
            if got["msg_type"] == "stream":
                said += got["content"]["text"]
            waited_for -= {got["msg_type"], got["content"].get("execution_state")}
        return said

    def close(self, handle: Kernel) -> None:
        handle.channel.close()
        handle.container.remove(force=True)

    def container(self, handle: Kernel) -> str:
        return str(handle.container.id)

    def finish(self) -> None:
        self._engine.close()
