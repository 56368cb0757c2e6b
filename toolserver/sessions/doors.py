"""The doors of sessions to the egress proxy: one for each image that may reach out, with what may go through it now.

A door's name is the capability: 32 random hexadecimal digits, stored with its session, so that a later server opens the same
doors again and sandboxes that outlived the earlier one go on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolserver.catalog.image import ToolImage
from toolserver.egress.policy import EgressPolicy, narrowed
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import SandboxRuntime
from toolserver.sandbox.egress_gate import EgressGate, InjectedHeader
from toolserver.settings import EgressSettings

PROXY = "http://127.0.0.1:3128"
_NOT_PROXIED = "localhost,127.0.0.1,::1"
_CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")
_AUTHORITIES = "/.toolcrib/egress/ca.pem"


@dataclass(frozen=True)
class Owner:
    """Whose door it is."""

    tenant: str
    session_id: str
    image: str


def new_door() -> str:
    return secrets.token_hex(16)


def operator_policy(settings: EgressSettings) -> EgressPolicy:
    """The most that any session gets."""
    return EgressPolicy(settings.max_mode, settings.allow if settings.max_mode == "allow" else ())


def proxy_variables(image: ToolImage) -> dict[str, str]:
    """The environment that makes programs of an added image use its door: they are not told later."""
    told = {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY, "NO_PROXY": _NOT_PROXIED}
    told |= {name.lower(): value for name, value in told.items()}
    if image.header_secrets:
        told |= dict.fromkeys(_CERTIFICATES, _AUTHORITIES)
    return told


class Doors:
    """Owns the gate. `denied` and `used` are told what the proxy refused and carried, and for whom. `close` must be called."""

    def __init__(self, runtime: SandboxRuntime, settings: EgressSettings) -> None:
        self.denied: Callable[[Owner, Mapping[str, Any]], None] = lambda _owner, _told: None
        self.used: Callable[[Owner, Mapping[str, Any]], None] = lambda _owner, _told: None
        self.most = operator_policy(settings)
        self._runtime = runtime
        self._owners: dict[str, Owner] = {}
        limits = {
            "connections": settings.max_connections,
            "connection_bytes": settings.max_connection_mb << 20,
            "door_bytes": settings.max_total_mb << 20,
            "idle_s": settings.idle_s,
            "total_s": settings.max_connection_s,
        }
        configuration = {
            "allow_private": list(settings.allow_private),
            "limits": limits,
            "authorities": settings.authorities(),
        }
        self._gate = EgressGate(
            runtime.start_egress,
            configuration,
            denied=lambda told: self._tell(self.denied, told),
            used=lambda told: self._tell(self.used, told),
        )

    def may_reach_out(self, image: ToolImage) -> bool:
        """Whether any session may have a door for it."""
        return narrowed(self.most, image.egress).mode != "none"

    def way_out(self, owner: Owner, image: ToolImage, door: str, session: EgressPolicy) -> WayOut:
        return WayOut(self, owner, image, door, narrowed(session, image.egress))

    async def open(self, way_out: WayOut, sandbox_id: str) -> None:
        """Raises RuntimeUnavailable: it is opened as soon as that can be done, unless it is shut before."""
        self._owners[way_out.door] = way_out.owner
        headers = await asyncio.to_thread(_headers, way_out.image)
        folder = self._runtime.door_folder(sandbox_id)
        try:
            await self._gate.open(way_out.door, way_out.policy, headers, folder)
        except ValueError as problem:
            raise RuntimeUnavailable(
                f"The egress proxy can't take what the image {way_out.image.name} wants: {problem}"
            ) from problem

    async def shut(self, door: str) -> None:
        self._owners.pop(door, None)
        await self._gate.close_door(door)

    async def settle(self) -> None:
        """All that was refused before now was told once this returns."""
        await self._gate.settle()

    async def close(self) -> None:
        await self._gate.close()

    def _tell(self, told: Callable[[Owner, Mapping[str, Any]], None], what: Mapping[str, Any]) -> None:
        owner = self._owners.get(str(what.get("door")))
        if owner is not None:
            told(owner, what)


class WayOut:
    """One image's door in a session. `policy` is what may go through it, now or once it is opened."""

    def __init__(self, doors: Doors, owner: Owner, image: ToolImage, door: str, policy: EgressPolicy) -> None:
        self._doors, self.owner, self.image, self.door, self.policy = doors, owner, image, door, policy

    @property
    def told(self) -> str | None:
        """The door that a worker is told of: none while the session reaches nothing."""
        return None if self.policy.mode == "none" else self.door

    async def open(self, sandbox_id: str) -> None:
        """For this sandbox, or again with another policy. Raises RuntimeUnavailable, SecretMissing.

        An added image has its door all the time, as nobody can tell it later: without egress, one that refuses everything.
        """
        if self.told is None and self.image.origin == "builtin":
            await self.shut()
        else:
            await self._doors.open(self, sandbox_id)

    async def shut(self) -> None:
        """No error when it is not open."""
        await self._doors.shut(self.door)

    async def settle(self) -> None:
        await self._doors.settle()


def _headers(image: ToolImage) -> list[InjectedHeader]:
    """Raises SecretMissing."""
    return [InjectedHeader(one.host, one.header, one.source.read(), one.prefix) for one in image.header_secrets]
