"""The composition root: builds the server out of its parts, starts it, serves, and takes it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import uvicorn
from sqlalchemy import Connection
from starlette.types import ASGIApp

from toolserver.api import gauges
from toolserver.api.application import application
from toolserver.api.auth import Authenticator
from toolserver.api.events import Streams
from toolserver.api.protocol import protocol_class
from toolserver.api.services import Phase, Readiness, Services
from toolserver.calls import recovery
from toolserver.calls.call_journal import CallJournal
from toolserver.calls.carry_out import stop
from toolserver.calls.executor import Executor, draining
from toolserver.calls.follow import CallDesk
from toolserver.calls.journal_recovery import close_gaps
from toolserver.calls.watch import Watch, take_up
from toolserver.catalog.catalog import Catalog
from toolserver.errors import JournalUnavailable, RequirementMissing, StartRefused, StoreUnavailable
from toolserver.journal.journal import Journal
from toolserver.journal.segments import folder_of
from toolserver.runtime.base import SandboxRuntime
from toolserver.runtime.choose import choose_runtime, weaknesses
from toolserver.sandbox.fake_catalog import fake_catalog
from toolserver.sessions.keep import keep_workspaces
from toolserver.sessions.places import SessionPlaces
from toolserver.sessions.reaper import Reaper
from toolserver.sessions.registry import Registry
from toolserver.settings import Settings
from toolserver.snapshots.desk import Snapshots
from toolserver.store import journal_head, keys
from toolserver.store.connection import database_path
from toolserver.store.database import Database
from toolserver.store.lock import StateLock
from toolserver.telemetry.metrics import Metrics
from toolserver.telemetry.observer import RequestObserver
from toolserver.telemetry.spans import Spans, SpansMissing, open_spans
from toolserver.tenants.quotas import Quotas

FIRST_TENANT = "default"
_STOP_S = 1.0  # how long calls that are cancelled at shutdown get to end by themselves
_END_S = 10.0  # how long all sessions together get to be cleaned up at shutdown
_KEEP_S = 8.0  # how long all workspaces together get to be kept at shutdown
_UP_S = 60.0  # for the socket and the sweep of orphans
_PARENTS_LEASE_S = 30.0
_log = logging.getLogger(__name__)


def server_id(state_dir: Path) -> str:
    """Names this server on its engine: the same folder, the same server."""
    return hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:12]


class ToolServer:
    """All of the server but its HTTP socket. `start`, serve `asgi`, `drain`, `close`."""

    def __init__(
        self,
        settings: Settings,
        runtime: SandboxRuntime,
        catalog: Catalog | None = None,
        *,
        keep_workspaces_in: Path | None = None,
    ) -> None:
        """Owns the runtime from here on. The catalog is the one that comes with the package unless one is given.

        `keep_workspaces_in`: a folder that gets the workspaces of the sessions that a shutdown ends; None: they are deleted.
        """
        self._keep_workspaces_in = keep_workspaces_in
        self.settings, self.runtime = settings, runtime
        self.catalog = catalog or Catalog.load(settings)
        self.database = Database(database_path(settings.state_dir))
        self.metrics = Metrics()
        self.spans = _open_spans(settings)
        self.observer = RequestObserver(self.metrics, self.spans)
        self.streams = Streams(settings.http.max_streams, settings.http.max_streams_per_tenant, self.metrics)
        self.journal = Journal(folder_of(settings.state_dir), settings.journal)
        self.call_journal = CallJournal(self.journal)
        self.quotas = Quotas(settings.session, settings.tenant)
        self.registry = Registry(
            settings,
            runtime,
            self.catalog,
            self.database,
            journal=self.journal,
            places=SessionPlaces(settings, self.quotas, self.catalog.images),
            counted=self._count_start,
            claimed=self._count_claim,
            hot=self._runs_hot,
        )
        self.executor = Executor(
            settings.call,
            self.registry,
            self.catalog,
            self.database,
            journal=self.call_journal,
            quotas=self.quotas,
            queue=settings.queue,
            counted=self._count_call,
        )
        self.watch = Watch(self.database, self.journal, self.quotas)
        self.desk = CallDesk(settings.call, self.registry, self.executor)
        self.snapshots = Snapshots(
            settings.snapshot, self.database, settings.state_dir / "snapshots", self.executor.running_in
        )
        self.reaper = Reaper(self.registry, self.database)
        self.readiness = Readiness(runtime, self.database)
        self.authenticator = Authenticator(self.database)
        self.asgi: ASGIApp = application(self._services(), version("toolcrib"))
        self.new_key_file: Path | None = None
        self.begun = asyncio.Event()  # set once work is taken
        self._lock = StateLock(settings.state_dir)
        self._tasks: list[asyncio.Task[None]] = []
        gauges.describe(self.metrics, self._services(), self.executor)

    def _services(self) -> Services:
        return Services(
            settings=self.settings,
            runtime=self.runtime,
            catalog=self.catalog,
            registry=self.registry,
            database=self.database,
            calls=self.desk,
            snapshots=self.snapshots,
            authenticator=self.authenticator,
            readiness=self.readiness,
            metrics=self.metrics,
            streams=self.streams,
            observer=self.observer,
            journal=self.journal,
        )

    async def start(self) -> None:
        """Take the state folder, go on with what an earlier process left, begin. Raises StartRefused."""
        self._lock.take()
        try:
            self.database.open()
            try:
                self.journal.open()
                self.call_journal.open()
                self.journal.append("server_started", version=version("toolcrib"), runtime=self.runtime.name)
                self._first_key()
                found = self.database.run(recovery.take_stock)
                gaps = self.database.run(lambda c: close_gaps(c, self.journal), writes=False)
                self.database.run(lambda c: take_up(c, self.quotas), writes=False)
            except JournalUnavailable as problem:
                raise StartRefused(f"The calls journal can't be used: {problem}.") from problem
            except StoreUnavailable as problem:
                raise StartRefused(f"The database can't be written: {problem}.") from problem
            if gaps:
                _log.warning("journal_gaps_closed", extra={"fields": {"calls": gaps}})
            if found.sessions:
                count = {"epoch": found.epoch, "sessions": len(found.sessions), "calls": len(found.calls)}
                _log.warning("left_open_by_earlier_process", extra={"fields": count})
            for problem_text in self.catalog.problems:
                _log.error("image_refused", extra={"fields": {"problem": problem_text}})
            if not found.sessions:
                await self._open_runtime()
            self.registry.take_over(found.epoch, found.sessions, found.sandboxes)
            self.executor.take_over(found.calls)
        except BaseException:
            self.journal.close()
            self.database.close()
            self._lock.release()
            raise
        if found.sessions:  # they are not kept waiting: to find a sandbox again takes no more than its handle
            self._tasks.append(asyncio.create_task(self._open_late(), name="open the runtime"))
        self._tasks += [
            asyncio.create_task(self._begin(), name="begin"),
            asyncio.create_task(self.watch.run(), name="watch"),
        ]

    async def _open_runtime(self) -> None:
        """Raises StartRefused."""
        try:
            await self.runtime.open()
        except RequirementMissing as problem:
            raise StartRefused(str(problem)) from problem

    async def _open_late(self) -> None:
        """Of a server that goes on with sessions: it goes on with them, and starts nothing new while something is missing."""
        try:
            await self._open_runtime()
        except StartRefused as problem:
            _log.error("requirement_missing", extra={"fields": {"problem": str(problem)}})

    async def _begin(self) -> None:
        """Work is taken at once; the first reconcile finds the sandboxes of sessions that live, and removes orphans."""
        if self.readiness.phase is Phase.STARTING:
            self.readiness.phase = Phase.SERVING
        self.begun.set()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.registry.pool.run(), name="pool")
            loops.create_task(self.reaper.run(), name="reaper")
            loops.create_task(self.snapshots.run(), name="snapshots")

    def _first_key(self) -> None:
        """The admin key of the settings; else, on the very first start, one that is made and put into a file."""
        given = self.settings.api_key
        if given is not None:
            text = given.get_secret_value()
            self.database.run(lambda connection: self._ensure_key(connection, text))
            return
        if any(
            key.revoked_at is None and key.scope == "admin" for key in self.database.run(keys.listing, writes=False)
        ):
            return
        text = keys.new_text()
        path = self.settings.state_dir / "admin.key"
        path.touch(mode=0o600)
        path.chmod(0o600)
        path.write_text(text + "\n")
        self.database.run(lambda connection: self._ensure_key(connection, text))
        self.new_key_file = path

    def _ensure_key(self, connection: Connection, text: str) -> None:
        known = {key.key_id for key in keys.listing(connection) if key.revoked_at is None and key.scope == "admin"}
        key = keys.ensure(connection, text, "first admin", FIRST_TENANT, "admin")
        if key.key_id not in known:
            self.journal.append("key_created", **keys.journalled(key), by="settings")

    @property
    def _keeps_sessions(self) -> bool:
        return self.settings.session.at_shutdown == "keep"

    async def drain(self) -> None:
        """Take nothing new, wait for what runs, then cancel it, or leave it to the next server. Safe to call twice."""
        self.readiness.phase = Phase.DRAINING
        self.registry.places.queue.refuse_all(draining())
        self.registry.pool.stop()
        grace_s = self.settings.call.kill_grace_s
        if self._keeps_sessions:
            await self.executor.drain(self.settings.http.drain_s, 0, None)
            await self.executor.leave()
            return
        await self.executor.drain(
            self.settings.http.drain_s,
            _STOP_S,
            lambda call: stop(call, "shutdown", min(grace_s, _STOP_S / 2)),
        )

    async def close(self) -> None:
        """End every session and leave nothing behind; or leave them as they are for the next server."""
        self.readiness.phase = Phase.DRAINING
        self.executor.draining = True
        self.registry.places.queue.refuse_all(draining())
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        if self._keep_workspaces_in is not None:
            most = self.settings.http.max_upload_mb << 20
            await keep_workspaces(self.registry.live(), self._keep_workspaces_in, max_bytes=most, within_s=_KEEP_S)
        if self._keeps_sessions:
            await self.executor.leave()
            await self.reaper.note_use()
            await self.registry.release(_END_S)
        else:
            await self.registry.close(_END_S)
        await self.executor.close()
        await self.snapshots.close()
        await self.runtime.close()
        self.journal.append_surely("server_stopped")
        self.journal.close()
        with contextlib.suppress(StoreUnavailable):
            await self.database.write(lambda connection: journal_head.note(connection, str(self.journal.head)))
        self.database.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        self._lock.release()

    def _count_start(self) -> None:
        self.metrics.count("toolserver_sandboxes_started_total")

    def _count_claim(self, start: str) -> None:
        self.metrics.count("toolserver_pool_claims_total", start=start)

    def _runs_hot(self) -> bool:
        return len(self.executor.running()) >= len(os.sched_getaffinity(0))

    def _count_call(self, tool: str, code: str, seconds: float) -> None:
        self.metrics.count("toolserver_calls_total", tool=tool, code=code)
        self.metrics.observe("toolserver_call_seconds", seconds, tool=tool)


def _open_spans(settings: Settings) -> Spans | None:
    """Raises StartRefused."""
    try:
        return open_spans(settings.telemetry.otlp_endpoint, version("toolcrib"))
    except SpansMissing as problem:
        raise StartRefused(str(problem)) from problem


@dataclass(frozen=True)
class ServeOptions:
    """`ready_file`: gets {"url", "pid"} once the server takes requests. `exit_with_parent`: ends when stdin does.

    `keep_workspaces`: the folder for the workspaces of the sessions that the shutdown ends.
    """

    ready_file: Path | None = None
    exit_with_parent: bool = False
    keep_workspaces: Path | None = None


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
        crib = ToolServer(settings, runtime, catalog, keep_workspaces_in=_keeping_folder(options))
        await crib.start()
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


async def _choose(settings: Settings) -> tuple[SandboxRuntime, str | None]:
    try:
        return await choose_runtime(settings.runtime, server_id(settings.state_dir), settings.state_dir)
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
    _log.info("draining", extra={"fields": {"running_calls": len(crib.executor.running())}})
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
