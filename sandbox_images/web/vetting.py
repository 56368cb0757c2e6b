"""Decides whether a host may be reached, and at which addresses: the only ones that are then connected to.

The name is resolved once. Every address it has must be public; one that is not refuses the host, since a resolver that
mixes them is either broken or hostile. The caller connects to the returned addresses themselves, never to the name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sandbox_images.base.outcome import denied, failed
from sandbox_images.web.addresses import address_refusal, name_refusal
from sandbox_images.web.settings import Settings
from sandbox_images.web.web_address import WebAddress

RESOLVE_TIMEOUT_S = 10.0
MAX_ADDRESSES = 8

Resolver = Callable[[str, int], Awaitable[list[str]]]


async def system_resolver(host: str, port: int) -> list[str]:
    """The system's addresses of `host`, in the order to try them. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True)
class Vetting:
    """The policy of this worker. `resolver` is an argument of the code, never of the environment."""

    settings: Settings
    resolver: Resolver = system_resolver

    async def addresses(self, address: WebAddress) -> list[str]:
        """Where `address` may be reached. Raises Ended: `denied` with the rule, or `failed` when the name has no address."""
        trusted = self._trusted(address.host, address.port)
        refusal = None if trusted else name_refusal(address.host)
        if refusal is not None:
            raise denied(_refusal_text(address, f"it is {refusal}"))
        found = await self._resolve(address)
        for one in found:
            refusal = None if trusted or self._trusted(one, address.port) else address_refusal(one)
            if refusal is not None:
                where = "it is" if one == address.host else f"it resolves to {one},"
                raise denied(_refusal_text(address, f"{where} {refusal}"))
        return found[:MAX_ADDRESSES]

    def _trusted(self, host: str, port: int) -> bool:
        return (host.rstrip("."), port) in self.settings.allow_private

    async def _resolve(self, address: WebAddress) -> list[str]:
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                found = await self.resolver(address.host, address.port)
        except TimeoutError as problem:
            raise failed(
                f"The name {address.host} could not be resolved within {RESOLVE_TIMEOUT_S:.0f} s."
            ) from problem
        except (OSError, UnicodeError) as problem:
            raise failed(
                f"The name {address.host} has no address: check its spelling, and that this session has a network."
            ) from problem
        if not found:
            raise failed(f"The name {address.host} has no address.")
        return found


def _refusal_text(address: WebAddress, why: str) -> str:
    return (
        f"{address.host}:{address.port} is refused: {why}, and only public addresses may be reached. "
        "The operator can allow one with TOOLSERVER_WEB__ALLOW_PRIVATE (host:port)."
    )
