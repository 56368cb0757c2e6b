"""Decides at which addresses a host may be reached: the only ones that are then connected to.

A name is resolved once a connection. Every address it has must be public; one that is not refuses the host, since a
resolver that mixes them is broken or hostile. The caller connects to the returned addresses themselves, never to the name.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from ssl import SSLContext

from sandbox_images.egress.addresses import address_refusal, name_refusal
from sandbox_images.egress.problems import Refused, Unanswered
from sandbox_images.egress.target import Target

RESOLVE_S = 10.0
MAX_ADDRESSES = 8
_THREADS = 128  # each for one name; they can't be ended, and a name may take a resolver half a minute
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Outside(ABC):
    """The network as the proxy uses it: names are asked for here and connections made here, nowhere else."""

    @abstractmethod
    async def resolve(self, name: str, port: int) -> list[str]:
        """Addresses of `name`, in the order to try them. Raises OSError, UnicodeError."""

    @abstractmethod
    async def connect(self, address: str, port: int, tls: SSLContext | None, name: str | None) -> Streams:
        """To an address, never a name. `name` is what TLS verifies. Raises OSError."""

    def is_own(self, address: str) -> bool:  # noqa: ARG002
        """Whether it is an address of the machine, or network namespace, that the proxy is on."""
        return False


class System(Outside):
    """The machine's resolver and its network."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resolve")
        self._binds_all = _can_bind("192.0.2.1")  # a setting of the kernel's: then nothing can be told by it

    async def resolve(self, name: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def connect(self, address: str, port: int, tls: SSLContext | None, name: str | None) -> Streams:
        return await asyncio.open_connection(
            address, port, ssl=tls, server_hostname=name if tls else None, family=socket.AF_UNSPEC
        )

    def is_own(self, address: str) -> bool:
        return not self._binds_all and _can_bind(address)


def _can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as tried:
            tried.bind((address, 0))
    except OSError:
        return False
    return True


class Vetting:
    """allow_private: canonical `host:port`, for names and addresses that may be reached although they are not public."""

    def __init__(self, outside: Outside, allow_private: frozenset[str] = frozenset()) -> None:
        self.outside, self.allow_private = outside, allow_private

    async def addresses(self, target: Target, turns: asyncio.Semaphore) -> list[str]:
        """Where `target` may be reached. Raises Refused (rules `private_name`, `private_address`) and Unanswered.

        `turns` is taken while a name is resolved, given up on or not, so that one door's slow names don't hold up all.
        """
        self.check_name(target)
        found = [target.host] if target.is_address else await self._resolve(target, turns)
        for address in found:
            self.check_address(target, address)
        return found[:MAX_ADDRESSES]

    def check_name(self, target: Target) -> None:
        """Raises Refused."""
        refusal = None if self._trusts(target) else name_refusal(target.host)
        if refusal is not None:
            raise Refused("private_name", target.host, target.port, _sentence(target, f"it is {refusal}"))

    def check_address(self, target: Target, address: str) -> None:
        """Raises Refused. The address itself is not told: what a private name resolves to is no business of a sandbox."""
        if self._trusts(target) or self._trusts(Target(address, target.port)):
            return
        refusal = address_refusal(address) or ("an address of this machine" if self.outside.is_own(address) else None)
        if refusal is not None:
            how = "it is" if target.is_address else "it resolves to"
            raise Refused("private_address", target.host, target.port, _sentence(target, f"{how} {refusal}"))

    def _trusts(self, target: Target) -> bool:
        return str(target) in self.allow_private

    async def _resolve(self, target: Target, turns: asyncio.Semaphore) -> list[str]:
        def over(task: asyncio.Task[list[str]]) -> None:
            turns.release()
            if not task.cancelled():
                task.exception()  # looked at, where nobody waits for it any more

        try:
            async with asyncio.timeout(RESOLVE_S):
                await turns.acquire()
                asking = asyncio.get_running_loop().create_task(self.outside.resolve(target.host, target.port))
                asking.add_done_callback(over)
                found = await asyncio.shield(asking)
        except TimeoutError as late:
            raise Unanswered("timeout", f"The name {target.host} was not resolved within {RESOLVE_S:.0f} s.") from late
        except (OSError, UnicodeError) as problem:
            raise Unanswered("no_address", f"The name {target.host} has no address: check its spelling.") from problem
        if not found:
            raise Unanswered("no_address", f"The name {target.host} has no address: check its spelling.")
        return found


def _sentence(target: Target, why: str) -> str:
    return (
        f"{target} is refused: {why}, and only public addresses may be reached. "
        "The operator can allow one with TOOLSERVER_EGRESS__ALLOW_PRIVATE (host:port)."
    )
