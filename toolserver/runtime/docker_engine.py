"""Control calls to the Docker engine: the blocking SDK behind a bounded thread pool, deadlines, one place for errors."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

from toolserver.errors import RuntimeUnavailable

Result = TypeVar("Result")
THREADS = 16
NOT_ANSWERING = (
    "The Docker engine does not answer. Start it, or set TOOLSERVER_RUNTIME__DOCKER_HOST to where it listens."
)


class NotInEngine(Exception):  # noqa: N818 - reads as the state it names
    """The engine knows no such container, volume or image."""


class Refused(Exception):  # noqa: N818 - reads as the answer it is
    """The engine's own no; `status` is its HTTP status, the message its words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def default_host() -> str:
    """Where an engine listens when no setting and no DOCKER_HOST says: the system's socket, else the user's rootless one."""
    system = Path("/var/run/docker.sock")
    mine = Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")) / "docker.sock"
    return f"unix://{mine if mine.exists() and not system.exists() else system}"


def make_client(docker_host: str | None, timeout_s: float) -> docker.APIClient:
    """A new client, after one round trip to agree on a version. Raises what the SDK raises."""
    found = kwargs_from_env()
    tls = found.get("tls")
    base_url = docker_host or found.get("base_url") or default_host()
    if str(base_url).startswith("unix://"):
        # the SDK does not close a socket that could not connect, so it is tried first
        with socket.socket(socket.AF_UNIX) as trial:
            trial.settimeout(timeout_s)
            trial.connect(str(base_url).removeprefix("unix://"))
    return docker.APIClient(
        base_url=base_url,
        version="auto",
        timeout=max(1, round(timeout_s)),
        tls=tls if isinstance(tls, TLSConfig) else False,
        num_pools=THREADS,
    )


class DockerEngine:
    """`call` runs a function of the SDK's client in a thread. An engine that hangs costs threads, never the event loop.

    The client is made at the first call that finds an engine, so one that is absent at start is picked up later.
    """

    def __init__(self, docker_host: str | None, timeout_s: float) -> None:
        self._docker_host, self._timeout_s = docker_host, timeout_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._client: docker.APIClient | None = None

    async def call(self, work: Callable[[docker.APIClient], Result], *, timeout_s: float | None = None) -> Result:
        """Raises NotInEngine, Refused, and RuntimeUnavailable when there is no answer in time."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, self._run, work)
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s + 1):
                return await future
        except TimeoutError as late:
            raise RuntimeUnavailable(NOT_ANSWERING) from late

    def _run(self, work: Callable[[docker.APIClient], Result]) -> Result:
        try:
            if self._client is None:
                self._client = make_client(self._docker_host, self._timeout_s)
            return work(self._client)
        except docker.errors.NotFound as missing:
            raise NotInEngine(str(missing.explanation)) from missing
        except docker.errors.APIError as said:
            raise Refused(
                said.response.status_code if said.response is not None else 500, str(said.explanation)
            ) from said
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError, ValueError) as problem:
            # ValueError: an answer that is not the JSON it should be
            raise RuntimeUnavailable(NOT_ANSWERING) from problem

    async def image(self, reference: str) -> dict[str, Any]:
        """What the engine tells of an image, by name or id. Raises NotInEngine, Refused, RuntimeUnavailable."""
        # the SDK's function has no annotations
        found: dict[str, Any] = await self.call(lambda client: client.inspect_image(reference))  # type: ignore[no-untyped-call]
        return found

    async def create(self, request: dict[str, Any], name: str) -> str:
        """Create a container from the engine's own form of request; its id, which stays when somebody renames it."""
        # the SDK's function has no annotations
        made = await self.call(lambda client: client.create_container_from_config(request, name))  # type: ignore[no-untyped-call]
        return str(made["Id"])

    async def update(self, container: str, resources: dict[str, Any]) -> None:
        """Change the resources of a running container, in the engine's own form: the SDK's function knows not all of them."""

        def post(client: Any) -> None:
            url = client._url("/containers/{0}/update", container)  # noqa: SLF001
            client._raise_for_status(client._post_json(url, data=resources))  # noqa: SLF001

        await self.call(post)

    async def attach(self, container: str, streams: Collection[str] = ("stdin", "stdout", "stderr")) -> socket.socket:
        """These streams of the container as one raw socket, to be attached before it is started."""
        return await self.call(lambda client: _attach(client, container, streams))

    def close(self) -> None:
        """Does not wait for threads that hang in a call; those end with the client's own time-out."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()


def _attach(client: docker.APIClient, container: str, streams: Collection[str]) -> socket.socket:
    params = {**dict.fromkeys(streams, 1), "stream": 1}
    attached: Any = client.attach_socket(container, params=params)
    inner = getattr(attached, "_sock", attached)
    if isinstance(inner, ssl.SSLSocket):
        attached.close()
        raise RuntimeUnavailable(
            "A Docker engine behind TLS is not supported. Run the ToolServer on the engine's machine."
        )
    # a descriptor of our own: the SDK closes its one with the HTTP response
    ours = socket.socket(fileno=os.dup(attached.fileno()))
    inner.close()
    attached.close()
    ours.setblocking(False)
    return ours
