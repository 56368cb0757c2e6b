"""A session's claim on the pool: what it wants is bound to a spare, or the answer says why it starts cold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits, SandboxRuntime
from toolserver.runtime.hardening import fixed_at_start, thread_env
from toolserver.sandbox.tool_sandbox import Term
from toolserver.sessions.doors import WayOut
from toolserver.sessions.pool import Pool
from toolserver.sessions.spare import Spare
from toolserver.telemetry.trace import Stage

_BIND_S = 3.0  # a spare that does not take its session in this time is not waited for


@dataclass(frozen=True)
class Wanted:
    """What a session wants of the sandbox of an image."""

    image: str
    limits: Limits
    way_out: WayOut | None
    env: Mapping[str, str]


@dataclass(frozen=True)
class Claim:
    """`spare` is the session's, bound to it; None: start one, for this `reason`."""

    spare: Spare | None
    reason: str | None = None


async def claim(pool: Pool, runtime: SandboxRuntime, wanted: Wanted, term: Term) -> Claim:
    """Never raises for what a cold start can do."""
    reason = pool.unfit(wanted.image)
    if reason is None and fixed_at_start(wanted.limits) != fixed_at_start(pool.limits(wanted.image)):
        reason = "its limits of disk or /tmp can't be changed later"
    if reason is not None:
        return Claim(None, reason)
    pool.note_demand(wanted.image)
    with Stage("start"):
        return await _bind_one(pool, runtime, wanted, term)


async def _bind_one(pool: Pool, runtime: SandboxRuntime, wanted: Wanted, term: Term) -> Claim:
    while (spare := pool.take(wanted.image)) is not None:
        try:
            await _resize(runtime, spare, wanted.limits)
        except RuntimeUnavailable as problem:
            pool.give_back(spare)
            return Claim(None, f"its limits can't be changed later: {problem}")
        except BaseException:
            pool.end(spare)
            raise
        try:
            if wanted.way_out is not None:
                await wanted.way_out.open(spare.spec.sandbox_id)
        except RuntimeUnavailable as problem:
            pool.give_back(spare)
            return Claim(None, f"its way out can't be opened: {problem}")
        except BaseException:
            pool.end(spare)
            raise
        door = None if wanted.way_out is None else wanted.way_out.told
        if await _bound(pool, spare, wanted.env, term, door):
            return Claim(spare)
    return Claim(None, "none was ready")


async def _resize(runtime: SandboxRuntime, spare: Spare, limits: Limits) -> None:
    if spare.sandbox is not None and limits != spare.limits:
        await runtime.resize(spare.sandbox.client.sandbox, limits)


async def _bound(pool: Pool, spare: Spare, env: Mapping[str, str], term: Term, door: str | None) -> bool:
    """Whether it took the session; if not, it is ended."""
    taken = False
    try:
        if spare.sandbox is not None:
            # what it was started with stands in its environment, for other limits perhaps
            await spare.sandbox.bind({**thread_env(spare.limits), **env}, spare.limits, term, _BIND_S, door)
            taken = True
    except RuntimeUnavailable:
        pass
    finally:
        if not taken:
            pool.end(spare)
    return taken
