"""All sessions: made whole or not at all, found by their tenant only, and ended in order: sandboxes first, then files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection

from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import LimitsOverride, ToolImage
from toolserver.egress.policy import EgressPolicy, narrowed
from toolserver.errors import Code, JournalUnavailable, RuntimeUnavailable, StoreUnavailable, ToolServerError
from toolserver.journal.journal import Journal
from toolserver.runtime.base import SandboxRuntime
from toolserver.sandbox.background import Background
from toolserver.sandbox.eras import Eras
from toolserver.sessions.box import Box
from toolserver.sessions.box_maker import BoxMaker
from toolserver.sessions.doors import Doors
from toolserver.sessions.holdings import Holdings
from toolserver.sessions.places import SessionPlaces
from toolserver.sessions.session import Cause, Ending, Grant, Session, new_session_id
from toolserver.sessions.use_marks import UseMarks
from toolserver.settings import Settings
from toolserver.store import boot as boot_clock
from toolserver.store import sandboxes as sandbox_rows
from toolserver.store import sessions as rows
from toolserver.store.database import Database
from toolserver.store.sandboxes import SandboxRow
from toolserver.store.sessions import SessionRow
from toolserver.telemetry.trace import Stage

Prepare = Callable[[Session], Awaitable[None]]
_log = logging.getLogger(__name__)


class Registry:
    def __init__(
        self,
        settings: Settings,
        runtime: SandboxRuntime,
        catalog: Catalog,
        database: Database,
        *,
        journal: Journal,
        places: SessionPlaces,
        counted: Callable[[], None] = lambda: None,
        claimed: Callable[[str], None] = lambda _start: None,
        hot: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        boot: str = "",
        eras: Eras | None = None,
        tools_seen: Callable[[str, list[dict[str, Any]]], str | None] = lambda _image, _tools: None,
        doors: Doors | None = None,
    ) -> None:
        """`counted` is told of each sandbox started, `claimed` of each that a session begins with (`warm` or `cold`).

        `hot`: so many calls run that a start for the pool would slow them. `clock` is monotonic. `boot` names the present boot of the machine.
        `eras`: what images were found to speak. `tools_seen` is told what a sandbox of an added image offers (image, entries of `tools/list`), and says why it must not be used, if so.
        """
        self.settings, self.runtime, self.catalog, self.clock = settings, runtime, catalog, clock
        self.background = Background()
        self.doors = doors or Doors(runtime, settings.egress)
        self.places = places
        self._database, self._journal = database, journal
        self._live: dict[str, Session] = {}
        self._ending: dict[str, Session] = {}  # gone for clients, not yet cleaned up or not yet written down
        self._creating: dict[str, str] = {}  # session id to tenant
        self._noted_use: dict[str, float] = {}
        self.use_marks = UseMarks(database, boot)
        self._clock_offset = boot_clock.clock_offset()
        self.holdings = Holdings()
        self.epoch = 0  # how many times the server was started on its database, once it is
        self.left_over = 0  # what was nobody's at the last reconcile and is not removed yet
        self._boxes = BoxMaker(
            settings,
            runtime,
            catalog,
            database,
            background=self.background,
            holdings=self.holdings,
            counted=counted,
            claimed=claimed,
            hot=hot,
            clock=clock,
            eras=eras or Eras(),
            tools_seen=tools_seen,
            doors=self.doors,
        )
        self.pool = self._boxes.pool

    def take_over(self, epoch: int, sessions: Iterable[SessionRow], sandboxes: Iterable[SandboxRow]) -> None:
        """Before anything else: go on with the sessions of the servers before this one, which has this `epoch`.

        They are live from here on; their sandboxes are found again when they are used, and all of them by `care`.
        """
        self.epoch = epoch
        self._boxes.begin_epoch(epoch)
        earlier = {(row.session_id, row.image): row for row in sandboxes}
        for row in sessions:
            grant = Grant.load(row.grant_json)
            grant = replace(grant, egress=narrowed(grant.egress, self.doors.most))
            images = [self.catalog.images[name] for name in grant.images if name in self.catalog.images]
            boxes = {
                image.name: self._boxes.make(
                    row.tenant,
                    row.session_id,
                    row.workspace_id,
                    image,
                    grant,
                    earlier=earlier.get((row.session_id, image.name)),
                )
                for image in images
            }
            if row.used_in_boot == self.use_marks.boot:
                self.use_marks.marked.add(row.session_id)
            self.holdings.workspaces.add(row.workspace_id)
            self.places.hold(row.session_id, row.tenant, grant)
            now, wall = self.clock(), time.time()
            self._live[row.session_id] = Session(
                session_id=row.session_id,
                workspace_id=row.workspace_id,
                tenant=row.tenant,
                grant=grant,
                created_at=row.created_at,
                started=now + row.expires_at - wall - grant.ttl_s,
                boxes=boxes,
                background=self.background,
                clock=self.clock,
                last_used=now - max(0.0, wall - row.last_used_at),
            )

    def follow_catalog(self, changed: Collection[str]) -> None:
        """Of these images: end the sandboxes that sessions have of them, and give them to those that may have them as they are now."""
        for session in self.live():
            for name in changed:
                if name not in session.grant.images:
                    continue
                box = session.boxes.get(name)
                if box is not None:
                    box.withdraw(f"The image {name} was changed or removed by the operator.")
                    self.background.spawn(box.close(session.session_id), f"end {name} of {session.session_id}")
                image = self.catalog.images.get(name)
                if image is not None:
                    session.boxes[name] = self._boxes.make(
                        session.tenant, session.session_id, session.workspace_id, image, session.grant
                    )

    async def care(self) -> None:
        """Find again what is to be found again, side by side. While the runtime is away it is tried again later."""
        boxes = [box for session in self.live() for box in session.boxes.values() if box.needs_care]
        ends = await asyncio.gather(*(box.care() for box in boxes), return_exceptions=True)
        for end in ends:
            if isinstance(end, RuntimeUnavailable):
                _log.warning("sandbox_not_found_yet", extra={"fields": {"problem": str(end)}})
            elif isinstance(end, BaseException):
                _log.error("sandbox_not_cared_for", exc_info=end)

    async def renew_leases(self) -> None:
        live = [box.live for session in self.live() for box in session.boxes.values()]
        await asyncio.gather(*(sandbox.renew() for sandbox in live if sandbox is not None))

    async def note_use(self) -> None:
        """Write down when sessions were used last, of those that were since the last time. Raises StoreUnavailable."""
        await self._note_clock()
        now, wall = self.clock(), time.time()
        used = {s.session_id: s.used_at(now) for s in self.live()}
        changed = {name: wall - (now - at) for name, at in used.items() if self._noted_use.get(name) != at}
        if changed:
            await self._database.write(lambda connection: rows.used(connection, changed))
        self._noted_use = used

    async def _note_clock(self) -> None:
        """When it was set, the times of live sessions go with it. Raises StoreUnavailable."""
        offset, noted = boot_clock.clock_offset(), self._clock_offset
        if abs(offset - noted) < 1:
            return
        self._clock_offset = offset

        def shift(connection: Connection) -> float:
            jump = boot_clock.clock_jump(connection, self.use_marks.boot, offset)
            rows.shift(connection, jump)
            return jump

        try:
            jump = await self._database.write(shift)
        except StoreUnavailable:
            self._clock_offset = noted
            raise
        for session in self.live():
            session.created_at += jump

    def live(self) -> list[Session]:
        return list(self._live.values())

    def by_state(self) -> dict[str, int]:
        """How many there are. `ending`: gone for clients, and not all of it is removed."""
        return {"creating": len(self._creating), "live": len(self._live), "ending": len(self._ending)}

    def live_session(self, session_id: str) -> Session | None:
        return self._live.get(session_id)

    def listing(self, tenant: str | None) -> list[Session]:
        """The live sessions of a tenant, oldest first; None: of all."""
        found = [s for s in self._live.values() if tenant is None or s.tenant == tenant]
        return sorted(found, key=lambda session: session.created_at)

    async def find(self, tenant: str | None, session_id: str) -> Session:
        """A live session of that tenant (None: of any). Raises session_not_found, session_gone, StoreUnavailable."""
        session = self._live.get(session_id) or self._ending.get(session_id)
        if session is not None and tenant in (None, session.tenant):
            session.check_live()
            return session
        if session is None and len(session_id) <= 64:
            tombstone = await self._database.read(lambda connection: rows.tombstone(connection, session_id))
            if tombstone is not None and tenant in (None, tombstone.tenant):
                raise Ending(tombstone.cause, tombstone.ended_at, tombstone.successor).error(session_id)
        raise ToolServerError(
            Code.SESSION_NOT_FOUND,
            "There is no such session. Create one with POST /v1/sessions, or look at GET /v1/sessions.",
        )

    async def create(
        self,
        tenant: str,
        grant: Grant,
        *,
        key_id: str | None = None,
        wait_s: float = 0,
        gone: Callable[[], Coroutine[Any, Any, None]] | None = None,
        prepare: Prepare | None = None,
    ) -> Session:
        """A ready session. While the server is full it waits for its turn, for `wait_s` seconds or until what `gone` makes ends.

        `prepare` works on it before anybody else can. Raises quota_exceeded, no_capacity, RuntimeUnavailable,
        StoreUnavailable, and what `prepare` raises: then nothing is left of it.
        """
        session_id = new_session_id()
        await self.places.take(session_id, tenant, grant, wait_s, gone)
        self._creating[session_id] = tenant
        work = self.background.spawn(self._create(session_id, tenant, grant, key_id, prepare), f"create {session_id}")
        return await asyncio.shield(work)  # begun is finished or undone, also when the client hangs up

    async def _create(
        self, session_id: str, tenant: str, grant: Grant, key_id: str | None, prepare: Prepare | None
    ) -> Session:
        told = False
        try:
            images = [self._offered(name) for name in grant.images]
            grant = self._boxes.with_doors(grant, images)
            with Stage("start"):
                claims = await self._boxes.claim(tenant, session_id, images, grant)
            spare = next((claim.spare for claim in claims.values() if claim.spare is not None), None)
            workspace_id = f"wsp_{secrets.token_hex(12)}" if spare is None else spare.spec.workspace_id
            if spare is not None and self.catalog.images[spare.image].limits == LimitsOverride():
                grant = replace(grant, limits=spare.limits)  # as they were read back
            boxes = {image.name: self._boxes.make(tenant, session_id, workspace_id, image, grant) for image in images}
            try:
                for name, found in claims.items():
                    await boxes[name].begin_with(found)
                if spare is None:
                    self.holdings.workspaces.add(workspace_id)
                    await self.runtime.create_workspace(workspace_id, grant.limits.disk_mb)
                await _start_all([boxes[image.name] for image in images if image.starts_with_session])
                session = self._session(session_id, workspace_id, tenant, grant, boxes)
                if prepare is not None:
                    await prepare(session)
                self._journal.append(
                    "session_created", key_id=key_id, **session.journalled([i.reference for i in images])
                )
                told = True
                row = _row_of(session, self.use_marks.boot)
                await self._database.write(lambda connection: rows.begin(connection, row))
            except BaseException:
                if told:
                    self._journal.append_surely("session_ended", tenant=tenant, session_id=session_id, cause="not_made")
                await self._dismantle(session_id, workspace_id, boxes)
                with contextlib.suppress(StoreUnavailable):  # the next start forgets them
                    await self._database.write(lambda connection: sandbox_rows.forget(connection, session_id))
                raise
            self.use_marks.marked.add(session_id)
            self._live[session_id] = session
            self.follow_catalog({one.name for one in images if self.catalog.images.get(one.name) is not one})
        except BaseException:
            self.places.release(session_id)
            raise
        finally:
            del self._creating[session_id]
        _log.info("session_created", extra={"fields": {"session_id": session_id, "tenant": tenant}})
        return session

    def _offered(self, name: str) -> ToolImage:
        """Raises RuntimeUnavailable: it went while the session waited for its turn."""
        image = self.catalog.images.get(name)
        if image is None:
            raise RuntimeUnavailable(f"The image {name} is not offered any more.")
        return image

    def _session(self, session_id: str, workspace_id: str, tenant: str, grant: Grant, boxes: dict[str, Box]) -> Session:
        now = self.clock()
        return Session(
            session_id, workspace_id, tenant, grant, time.time(), now, boxes, self.background, self.clock, last_used=now
        )

    async def set_egress(self, session: Session, policy: EgressPolicy, *, key_id: str | None = None) -> None:
        """What the session may reach from now on; what it may no longer is cut before this returns.

        Raises quota_exceeded, no_capacity, RuntimeUnavailable, StoreUnavailable, JournalUnavailable: then it may reach what it
        could before, or less.
        """
        work = self.background.spawn(self._set_egress(session, policy, key_id), f"egress of {session.session_id}")
        await asyncio.shield(work)

    async def _set_egress(self, session: Session, policy: EgressPolicy, key_id: str | None) -> None:
        async with session.regranting:
            session.check_live()
            before = session.grant
            try:
                await self._regrant(session, replace(before, egress=policy), key_id)
                await self._apply_egress(session)
            except BaseException:
                if session.grant is not before and session.ending is None:
                    with contextlib.suppress(RuntimeUnavailable, StoreUnavailable, JournalUnavailable, ToolServerError):
                        await self._regrant(session, replace(session.grant, egress=before.egress), key_id)
                        await self._apply_egress(session)
                raise

    async def _regrant(self, session: Session, grant: Grant, key_id: str | None) -> None:
        self.places.change(session.session_id, session.tenant, grant)
        told = {"egress": grant.egress.as_json()}
        self._journal.append(
            "egress_changed", tenant=session.tenant, key_id=key_id, session_id=session.session_id, **told
        )
        text = grant.dump()
        await self._database.write(lambda connection: rows.regrant(connection, session.session_id, text))
        session.grant = grant

    async def _apply_egress(self, session: Session) -> None:
        """Raises RuntimeUnavailable, when all boxes have come to rest."""
        results = await asyncio.gather(
            *(box.set_egress(session.egress_of(box.plan.image)) for box in session.boxes.values()),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def end(self, session: Session, cause: Cause, *, key_id: str | None = None) -> asyncio.Task[None]:
        """End a session: at once for its clients and its running calls. The task is done when nothing is left of it.

        `key_id`: the key of whoever deleted it.
        """
        if session.ending is None:
            session.ending = Ending(cause, time.time())
            self._live.pop(session.session_id, None)
            self.use_marks.marked.discard(session.session_id)
            self._ending[session.session_id] = session
            for tell in list(session.watchers):
                tell(session.ending)
            self.places.release(session.session_id)
            _log.info("session_ended", extra={"fields": {"session_id": session.session_id, "cause": cause}})
            by = {"key_id": key_id} if key_id is not None else {}
            self._journal.append_surely(
                "session_ended", tenant=session.tenant, session_id=session.session_id, cause=cause, **by
            )
            await self._write_down(session)
        return self.background.spawn(self._clean_up(session), f"end {session.session_id}")

    async def delete(self, session: Session, wait_s: float, *, key_id: str | None = None) -> None:
        """End it for its client: gone when this returns; the clean-up is waited for `wait_s` and goes on by itself."""
        ending = self.background.spawn(self.end(session, "deleted", key_id=key_id), f"delete {session.session_id}")
        await asyncio.wait([await asyncio.shield(ending)], timeout=wait_s)

    async def _write_down(self, session: Session, *, cleaned: bool = False) -> bool:
        ending = session.ending
        if ending is None:
            return False

        def write(connection: Connection) -> None:
            rows.end(connection, session.session_id, ending.cause, ending.at)
            if cleaned:
                sandbox_rows.forget(connection, session.session_id)

        try:
            await self._database.write(write)
        except StoreUnavailable as problem:
            # kept in `_ending`, so it is still answered with 410; the reaper tries again
            _log.error(
                "tombstone_not_written", extra={"fields": {"session_id": session.session_id, "problem": str(problem)}}
            )
            return False
        return True

    async def _clean_up(self, session: Session) -> None:
        if session.session_id not in self._ending:
            return
        whole = await self._dismantle(session.session_id, session.workspace_id, session.boxes)
        if whole and await self._write_down(session, cleaned=True):
            self._ending.pop(session.session_id, None)

    async def _dismantle(self, session_id: str, workspace_id: str, boxes: Mapping[str, Box]) -> bool:
        """Whether all of it is gone; if not, a reconcile takes the rest."""
        ends = await asyncio.gather(*(box.close(session_id) for box in boxes.values()), return_exceptions=True)
        problems = [end for end in ends if end is not None]
        try:
            await self.runtime.delete_workspace(workspace_id)
        except RuntimeUnavailable as problem:
            problems.append(problem)
        self.holdings.workspaces.discard(workspace_id)
        for told in problems:
            _log.error("session_not_cleaned_up", exc_info=told, extra={"fields": {"session_id": session_id}})
        return not problems

    async def retry_clean_up(self) -> None:
        """For the reaper: what could not be cleaned up or written down when its session ended."""
        for session in list(self._ending.values()):
            self.background.spawn(self._clean_up(session), f"end {session.session_id} again")

    async def reconcile(self) -> int:
        """Bring engine and store together: what is nobody's is removed, how much it was; a session that lost its workspace ends.

        Raises RuntimeUnavailable.
        """
        before = self.live()  # what is made later may be missing from the inventory
        found = await self.runtime.inventory()
        for session in before:
            if session.ending is None and session.workspace_id not in found.workspaces:
                _log.error("workspace_lost", extra={"fields": {"session_id": session.session_id}})
                await self.end(session, "node_lost")
        sandboxes, workspaces = self.holdings.orphans(found)
        self.left_over = count = len(sandboxes) + len(workspaces)
        await self.runtime.discard(sandboxes, workspaces)
        self.left_over = 0
        return count

    async def release(self, timeout_s: float) -> None:
        """Leave all sessions as they are, for the next server: their sandboxes run on."""
        boxes = [box for session in self._live.values() for box in session.boxes.values()]
        ends = [self.pool.close(timeout_s), *(box.release() for box in boxes)]
        await asyncio.gather(*ends, return_exceptions=True)
        await self.background.finish(timeout_s)

    async def close(self, timeout_s: float) -> None:
        """End all, the pool too, and wait until nothing is left of them."""
        ends: list[Any] = [self.background.spawn(self.pool.close(timeout_s), "end the pool")]
        ends += [await self.end(session, "shutdown") for session in self.live()]
        await asyncio.wait(ends, timeout=timeout_s)
        await self.background.finish(timeout_s)


def _row_of(session: Session, boot: str) -> SessionRow:
    return SessionRow(
        session_id=session.session_id,
        tenant=session.tenant,
        created_at=session.created_at,
        workspace_id=session.workspace_id,
        grant_json=session.grant.dump(),
        expires_at=session.created_at + session.grant.ttl_s,
        last_used_at=session.created_at,
        used_in_boot=boot,  # on the disk before any of its calls, or not there at all
    )


async def _start_all(boxes: list[Box]) -> None:
    """Start these side by side. Raises the first failure, when all have come to rest."""
    results = await asyncio.gather(*(box.sandbox() for box in boxes), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
