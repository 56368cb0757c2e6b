"""Serves until the end of the process: the socket and uvicorn, signals, the ready file, what the operator is told."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from toolserver.api.protocol import protocol_class
from toolserver.app import ToolServer, server_id
from toolserver.errors import RequirementMissing, StartRefused
from toolserver.runtime.base import SandboxRuntime
from toolserver.runtime.choose import choose_runtime, weaknesses
from toolserver.sandbox.fake_catalog import fake_catalog
from toolserver.settings import Settings

_UP_S = 60.0  # for the socket and the sweep of orphans
_PARENTS_LEASE_S = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeOptions:
    """`ready_file`: gets {"url", "pid"} once the server takes requests. `exit_with_parent`: ends when stdin does.

    `keep_workspaces`: the folder for the workspaces of the sessions that the shutdown ends. `added_images_of`: the state folder
    whose added images are offered in place of the server's own.
    """

    ready_file: Path | None = None
    exit_with_parent: bool = False
    keep_workspaces: Path | None = None
    added_images_of: Path | None = None


class _Uvicorn(uvicorn.Server):
    """Without signal handlers of its own: a shutdown drains first, while requests are still answered."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


async def serve(settings: Settings, options: ServeOptions, say: Callable[[str], None] = lambda _line: None) -> None:
    """Serve until SIGTERM, SIGINT, or the end of stdin. `say` is called with what the operator must read. Raises StartRefused."""
    _check_exposure(settings)
    listener = _bind(settings)
    try:
        runtime, weaker = await _choose(settings)
        if options.exit_with_parent:
            settings = _with_lease(settings, _PARENTS_LEASE_S)
        catalog = fake_catalog() if settings.runtime.name == "fake" else None
        crib = ToolServer(
            settings,
            runtime,
            catalog,
            keep_workspaces_in=_keeping_folder(options),
            added_images_of=options.added_images_of,
        )
        await crib.start()
        _spare_the_collector()
    except BaseException:
        listener.close()
        raise
    try:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if crib.new_key_file is not None:
            say(f"A new admin API key was made. It stands in {crib.new_key_file}")
        for line in (*([weaker] if weaker is not None else []), *weaknesses(runtime.isolation())):
            say(f"Weaker here: {line}")
        await _run(crib, listener, url, options, say)
    finally:
        await crib.close()
        listener.close()
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)


def _spare_the_collector() -> None:
    """What stands now stays: it is not to be looked through again and again for garbage, and the rest less often than usual.

    A call makes some hundreds of objects, of which nearly all go by their reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


async def _choose(settings: Settings) -> tuple[SandboxRuntime, str | None]:
    try:
        return await choose_runtime(
            settings.runtime, server_id(settings.state_dir), settings.state_dir, settings.egress.docker_network
        )
    except RequirementMissing as problem:
        raise StartRefused(str(problem)) from problem


def _with_lease(settings: Settings, most_s: float) -> Settings:
    """A server that goes with its parent may not come back: what it leaves must end soon by itself."""
    lease_s = min(settings.session.lease_s, most_s)
    return settings.model_copy(update={"session": settings.session.model_copy(update={"lease_s": lease_s})})


def _keeping_folder(options: ServeOptions) -> Path | None:
    """Made now, since at the shutdown it would be too late to say that it can't be."""
    folder = options.keep_workspaces
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise StartRefused(f"The folder {folder} of --keep-workspaces can't be made: {reason}.") from problem
    return folder


async def _run(
    crib: ToolServer, listener: socket.socket, url: str, options: ServeOptions, say: Callable[[str], None]
) -> None:
    http = crib.settings.http
    config = uvicorn.Config(
        crib.asgi,
        http=protocol_class(http.header_timeout_s, http.max_connections),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
    )
    server = _Uvicorn(config)
    ended = asyncio.Event()
    _on_end(ended, options)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    async with asyncio.timeout(_UP_S):
        await server.up.wait()
        await crib.begun.wait()
    if options.ready_file is not None:
        _write_ready(options.ready_file, url)
    say(f"ToolServer on {url} (runtime {crib.runtime.name})")
    waiting = asyncio.create_task(ended.wait(), name="until the end")
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    _log.info("draining", extra={"fields": {"running_calls": len(crib.executor.admission.held())}})
    await crib.drain()
    server.should_exit = True
    await serving


def _on_end(ended: asyncio.Event, options: ServeOptions) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if options.exit_with_parent:

        def watch() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            with contextlib.suppress(RuntimeError):  # the loop ended before stdin did
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=watch, name="stdin", daemon=True).start()


def _write_ready(path: Path, url: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    beside.replace(path)


def _check_exposure(settings: Settings) -> None:
    """Other machines must not be let in with a key that nobody chose."""
    host = settings.http.host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and settings.api_key is None:
        raise StartRefused(
            f"{host} is not a loopback address, and no API key was given. Set TOOLSERVER_API_KEY, or listen on 127.0.0.1."
        )


def _bind(settings: Settings) -> socket.socket:
    host, port = settings.http.host, settings.http.port
    try:
        place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(place[0], socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place[4])
            listener.listen(512)
        except OSError:
            listener.close()
            raise
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise StartRefused(
            f"Can't listen on {host} port {port}: {reason}. Choose another with --host and --port."
        ) from problem
    listener.setblocking(False)
    return listener
