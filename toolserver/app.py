"""The composition root: builds the server out of its parts, starts it, and takes it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from starlette.types import ASGIApp

from toolserver.api import gauges
from toolserver.api.application import application
from toolserver.api.auth import Authenticator
from toolserver.api.events import Streams
from toolserver.api.services import Phase, Readiness, Services
from toolserver.calls import denials, recovery
from toolserver.calls.admission import draining
from toolserver.calls.call_journal import CallJournal
from toolserver.calls.carry_out import stop
from toolserver.calls.executor import Executor
from toolserver.calls.follow import CallDesk
from toolserver.calls.journal_recovery import close_gaps
from toolserver.calls.watch import Watch, take_up
from toolserver.catalog.catalog import Catalog
from toolserver.errors import JournalUnavailable, RequirementMissing, StartRefused, StoreUnavailable
from toolserver.journal.journal import Journal
from toolserver.journal.segments import folder_of
from toolserver.runtime.base import SandboxRuntime
from toolserver.sandbox.eras import Eras
from toolserver.sessions.added_images import AddedImages
from toolserver.sessions.doors import Owner
from toolserver.sessions.keep import keep_workspaces
from toolserver.sessions.optional_images import OptionalImages
from toolserver.sessions.places import SessionPlaces
from toolserver.sessions.reaper import Reaper
from toolserver.sessions.registry import Registry
from toolserver.settings import Settings
from toolserver.snapshots.desk import Snapshots
from toolserver.store import boot, journal_head, keys, sessions
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
        added_images_of: Path | None = None,
    ) -> None:
        """Owns the runtime from here on. The catalog is the one that comes with the package unless one is given.

        `keep_workspaces_in`: a folder that gets the workspaces of the sessions that a shutdown ends; None: they are deleted.
        `added_images_of`: the state folder whose added images are offered, when it is not this server's.
        """
        self._keep_workspaces_in = keep_workspaces_in
        self.settings, self.runtime = settings, runtime
        self.catalog = catalog or Catalog.load(settings)
        self.optional_images = OptionalImages(self.catalog, runtime)
        self.database = Database(database_path(settings.state_dir))
        self.metrics = Metrics()
        self.spans = _open_spans(settings)
        self.observer = RequestObserver(self.metrics, self.spans)
        self.streams = Streams(
            settings.http.max_streams,
            settings.http.max_streams_per_tenant,
            self.metrics,
            "Nothing was run. Close one, or ask without Accept: text/event-stream.",
        )
        self.listeners = Streams(
            settings.mcp.max_listeners,
            settings.mcp.max_listeners_per_tenant,
            self.metrics,
            "Close one, or do without: tools are listed and called all the same.",
        )
        self.journal = Journal(folder_of(settings.state_dir), settings.journal)
        self.call_journal = CallJournal(self.journal)
        self.quotas = Quotas(settings.session, settings.tenant)
        self.boot = boot.boot_id()
        self.added_images = AddedImages(
            self.catalog,
            self.database,
            self.journal,
            settings.tools,
            unusable=runtime.added_problem(),
            elsewhere=added_images_of,
        )
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
            boot=self.boot,
            eras=Eras(self.added_images.learned),
            tools_seen=self.added_images.seen,
        )
        self.added_images.attach(self.registry)
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
        self.registry.doors.denied, self.registry.doors.used = self._egress_denied, self._egress_used
        self.watch = Watch(self.database, self.journal, self.quotas)
        self.desk = CallDesk(settings.call, self.registry, self.executor)
        self.snapshots = Snapshots(
            settings.snapshot, self.database, settings.state_dir / "snapshots", self.executor.admission.held_in
        )
        self.reaper = Reaper(self.registry, self.database, self.optional_images, self.added_images)
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
            listeners=self.listeners,
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
                found = self.database.run(lambda c: recovery.take_stock(c, self.boot), durable=True)
                self._journal_succession(found)
                gaps = self.database.run(
                    lambda c: close_gaps(c, self.journal, machine_lost=found.machine_lost), writes=False
                )
                self.database.run(lambda c: take_up(c, self.quotas), writes=False)
                self.added_images.begin()
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
            self.added_images.close()
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
            await self.optional_images.look()
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
            self.database.run(lambda connection: self._ensure_key(connection, text), durable=True)
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
        self.database.run(lambda connection: self._ensure_key(connection, text), durable=True)
        self.new_key_file = path

    def _ensure_key(self, connection: Connection, text: str) -> None:
        known = {key.key_id for key in keys.listing(connection) if key.revoked_at is None and key.scope == "admin"}
        key = keys.ensure(connection, text, "first admin", FIRST_TENANT, "admin")
        if key.key_id not in known:
            self.journal.append("key_created", **keys.journalled(key), by="settings")

    def _journal_succession(self, found: recovery.LeftOpen) -> None:
        """Raises JournalUnavailable."""
        for row, following in found.succeeded:
            who = {"tenant": row.tenant, "session_id": row.session_id}
            self.journal.append("session_ended", **who, cause="node_lost", successor=following.session_id)
        if found.machine_lost:
            fields = {"sessions": [following.session_id for _, following in found.succeeded]}
            _log.error("machine_was_lost", extra={"fields": fields})

    def _note_end(self, connection: Connection) -> None:
        """Of an orderly stop: all that was answered is on the disk with this."""
        journal_head.note(connection, str(self.journal.head))
        sessions.unmark_all(connection)
        boot.end(connection)

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
        self.executor.admission.draining = True
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
        await self.registry.doors.close()
        await self.runtime.close()
        self.journal.append_surely("server_stopped")
        self.journal.close()
        with contextlib.suppress(StoreUnavailable):
            await self.database.write(self._note_end, durable=True)
        self.added_images.close()
        self.database.close()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)
        self._lock.release()

    def _count_start(self) -> None:
        self.metrics.count("toolserver_sandboxes_started_total")

    def _egress_denied(self, owner: Owner, told: Mapping[str, Any]) -> None:
        calls = denials.note(self.executor.admission.held(), owner, told)
        self.metrics.count("toolserver_egress_denials_total", rule=str(told.get("rule")))
        which = {"call_id": calls[0]} if len(calls) == 1 else {}
        what = {name: told.get(name) for name in ("host", "port", "rule")}
        self.journal.append_surely(
            "egress_denied", tenant=owner.tenant, session_id=owner.session_id, image=owner.image, **which, **what
        )

    def _egress_used(self, _owner: Owner, told: Mapping[str, Any]) -> None:
        self.metrics.count("toolserver_egress_connections_total")
        for direction in ("up", "down"):
            self.metrics.count("toolserver_egress_bytes_total", float(told.get(direction) or 0), direction=direction)

    def _count_claim(self, start: str) -> None:
        self.metrics.count("toolserver_pool_claims_total", start=start)

    def _runs_hot(self) -> bool:
        return len(self.executor.admission.held()) >= len(os.sched_getaffinity(0))

    def _count_call(self, tool: str, code: str, seconds: float) -> None:
        self.metrics.count("toolserver_calls_total", tool=tool, code=code)
        self.metrics.observe("toolserver_call_seconds", seconds, tool=tool)


def _open_spans(settings: Settings) -> Spans | None:
    """Raises StartRefused."""
    try:
        return open_spans(settings.telemetry.otlp_endpoint, version("toolcrib"))
    except SpansMissing as problem:
        raise StartRefused(str(problem)) from problem
