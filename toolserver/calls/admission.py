"""Which calls are let in, and which run now: the checks before a call, its name, and its place among those that run at once."""

from __future__ import annotations

import json
from collections import Counter

from toolserver.calls.command_call import command_line
from toolserver.calls.request import CallRequest
from toolserver.calls.running import RunningCall
from toolserver.catalog import arguments as schema_check
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.image import Tool, ToolImage
from toolserver.egress.policy import narrowed
from toolserver.errors import Code, ToolServerError, invalid_all
from toolserver.sessions.session import Session
from toolserver.settings import CallSettings
from toolserver.telemetry.trace import about
from toolserver.tenants.fair_queue import FairQueue
from toolserver.tenants.quotas import Quotas


def draining() -> ToolServerError:
    return ToolServerError(
        Code.DRAINING, "The server is shutting down and takes no new calls. Try again when it is back."
    )


def _check_egress(tool: Tool, image: ToolImage, session: Session) -> None:
    """Raises policy_denied for what could only fail, or would reach more than the session may."""
    policy = session.egress_of(image)
    if image.needs_egress and not policy.reaches_out:
        raise ToolServerError(
            Code.POLICY_DENIED,
            f"The tool {tool.name} needs the network, and this session may reach nothing. Change that with PUT "
            f'/v1/sessions/{session.session_id}/egress and {{"mode": "allow", "allow": ["example.org"]}} or {{"mode": "open"}}, '
            "as far as the operator lets sessions reach out.",
        )
    shared = session.boxes[image.name].plan.way_out if image.scope == "shared" else None
    if shared is not None and narrowed(policy, shared.policy) != shared.policy:
        raise ToolServerError(
            Code.POLICY_DENIED,
            f"The tool {tool.name} runs in a sandbox that is shared with other sessions and may reach more than this one. Create "
            f"a session with the egress {json.dumps(shared.policy.as_json())} and call it there.",
        )


class Admission:
    """A call holds its name from before it waits for a place until its outcome is stored; a place only while it runs."""

    def __init__(self, settings: CallSettings, catalog: Catalog, quotas: Quotas, max_waiting: int) -> None:
        """`max_waiting`: calls of one tenant that may wait for a place."""
        self._settings, self._catalog, self._quotas = settings, catalog, quotas
        most = f"The server is full: {settings.max_running} calls run at once, its limit."
        self.queue = FairQueue(most, max_waiting)
        self.places_taken = 0
        self.draining = False
        self._held: dict[tuple[str, str], RunningCall] = {}
        self._per_session: Counter[str] = Counter()
        self._per_tenant: Counter[str] = Counter()

    def check(self, session: Session, request: CallRequest) -> Tool:
        """Raises tool_not_found, invalid_arguments, policy_denied, draining, quota_exceeded: nothing is held against the key."""
        tool = self._catalog.find(request.tool, session.images)
        if errors := schema_check.check(tool, request.arguments):
            raise invalid_all([{**error, "pointer": "/arguments" + error["pointer"]} for error in errors])
        image = self._catalog.images[tool.image]
        if image.kind == "cli":
            command_line(image, tool, request.arguments)
        _check_egress(tool, image, session)
        if self.draining:
            raise draining()
        session.check_not_restoring()
        most = self._settings.max_concurrent_per_session
        if (running := self._per_session[session.session_id]) >= most:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                f"{most} calls run in this session already, its limit. Wait until one has ended.",
                extra={"quota": "session_calls", "used": running, "limit": most, "left": 0, "asked": 1},
            )
        self._quotas.check_call(request.tenant, self._per_tenant[request.tenant])
        return tool

    # -- names

    def held(self) -> list[RunningCall]:
        """Calls that wait for their turn, run, or whose outcome waits to be stored."""
        return list(self._held.values())

    def find(self, tenant: str, call_id: str) -> RunningCall | None:
        return self._held.get((tenant, call_id))

    def held_in(self, session_id: str) -> int:
        """How many calls of a session are held now."""
        return self._per_session[session_id]

    def hold(self, call: RunningCall) -> None:
        """Before it is written down: a second request with its key joins this one."""
        about(call_id=call.call_id)
        self._held[(call.tenant, call.call_id)] = call
        self._per_session[call.session.session_id] += 1
        self._per_tenant[call.tenant] += 1

    def forget(self, call: RunningCall) -> None:
        if self.find(call.tenant, call.call_id) is not call:
            return
        del self._held[(call.tenant, call.call_id)]
        for counter, name in ((self._per_session, call.session.session_id), (self._per_tenant, call.tenant)):
            counter[name] -= 1
            if counter[name] <= 0:
                del counter[name]

    # -- places

    def try_place(self) -> bool:
        """Whether the call has a place at once: nobody waits, and there is room."""
        return self.queue.try_now(self._take_place)

    async def wait_for_place(self, tenant: str, wait_s: float) -> None:
        """Raises no_capacity after `wait_s` seconds, and when the tenant's line is full."""
        await self.queue.wait(tenant, self._take_place, self.give_place, wait_s)

    def take_place_anyhow(self) -> None:
        """For a call that runs already, whatever the bounds are now."""
        self.places_taken += 1

    def give_place(self) -> None:
        self.places_taken -= 1
        self.queue.serve()

    def _take_place(self) -> bool:
        if self.places_taken >= self._settings.max_running:
            return False
        self.places_taken += 1
        return True
