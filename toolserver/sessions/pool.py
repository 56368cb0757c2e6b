"""The warm pool: sandboxes started ahead of the sessions that will take them, each with a fresh workspace of its own.

One serves one session, or none. How many there are follows demand: the least that is set, plus the claims of the last
seconds, up to the most and within a bound of memory. Starts of the pool come one at a time, and only while no session's
start and not many calls are under way; after a failure they wait, longer each time. docs/decisions/warm-pool.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import Limits
from toolserver.sandbox.background import Background
from toolserver.sessions.spare import Spare, SpareMaker
from toolserver.settings import PoolSettings

RISE_S, FALL_S = 10.0, 60.0  # claims so long ago still raise the pool, and keep it from shrinking
TICK_S = 1.0
CHECK_S = 60.0  # each spare is asked for a sign of life so often, which also keeps its lease
PATIENCE_S = 5.0  # calls that run hot put off a start so long at most
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
_log = logging.getLogger(__name__)


class Pool:
    def __init__(
        self,
        settings: PoolSettings,
        maker: SpareMaker,
        images: Iterable[str],
        *,
        may_start: Callable[[], bool] = lambda: True,
        hot: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`images` get the least number each when idle; all others of `maker` only by demand.

        `may_start`: no session waits for a start; `hot`: so many calls run that a start would slow them.
        """
        self.settings = settings
        self._maker, self._may_start, self._hot, self._clock = maker, may_start, hot, clock
        self._eager = frozenset(images)
        self._spares: dict[str, deque[Spare]] = {}
        self._claims: dict[str, deque[float]] = {}
        self._unfit: dict[str, str] = {}  # images that can't be pooled, and why
        self._background = Background()
        self._wake = asyncio.Event()
        self._failures_in_row, self._not_before, self._cool_since = 0, 0.0, clock()
        self.failures = 0
        self.starting: Spare | None = None
        self.closed = False

    # -- what sessions ask

    def note_demand(self, image: str) -> None:
        """A session wants one of this image, whether or not there is one."""
        self._claims.setdefault(image, deque(maxlen=self.settings.max)).append(self._clock())
        self._wake.set()

    def take(self, image: str) -> Spare | None:
        """A spare that lives, the caller's from now on."""
        spares = self._spares.get(image, deque())
        while spares:
            spare = spares.popleft()
            if spare.alive:
                return spare
            self.end(spare)
        return None

    def give_back(self, spare: Spare) -> None:
        """One that was taken and not touched: nothing of any session is in it."""
        if self.closed or not spare.alive:
            self.end(spare)
        else:
            self._spares.setdefault(spare.image, deque()).appendleft(spare)

    def limits(self, image: str) -> Limits:
        """What the spares of an image are started with."""
        return self._maker.limits(image)

    def unfit(self, image: str) -> str | None:
        """Why this image is not pooled, if it is not."""
        if not self.settings.enabled:
            return "the pool is off"
        return self._maker.unfit(image) or self._unfit.get(image)

    # -- what others look at

    def ready(self) -> int:
        return sum(len(spares) for spares in self._spares.values())

    def wanted(self) -> int:
        return sum(self._wanted(image, RISE_S) for image in self._candidates()) if self.settings.enabled else 0

    def spares(self) -> list[Spare]:
        """All that are on the engine: those that wait, and the one that is being started."""
        held = [spare for spares in self._spares.values() for spare in spares]
        return held if self.starting is None else [*held, self.starting]

    # -- the loop

    async def run(self) -> None:
        """Until cancelled."""
        if not self.settings.enabled:
            return
        next_check = self._clock() + CHECK_S
        while True:
            try:
                await self.tend()
                if self._clock() >= next_check:
                    next_check = self._clock() + CHECK_S
                    await self.check()
            except Exception:  # noqa: BLE001 - the loop must outlive any single failure; it is logged and tried again
                _log.exception("pool_failed")
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()

    async def tend(self) -> None:
        """End what died or is too much, start what is missing, one after the other."""
        for image, spares in list(self._spares.items()):
            for spare in [spare for spare in spares if not spare.alive]:
                spares.remove(spare)
                self.end(spare)
            while len(spares) > self._wanted(image, FALL_S):
                self.end(spares.popleft())
        while (image_to_start := self._next()) is not None:
            # to its end, also when the loop is cancelled: `close` waits for it
            await asyncio.shield(self._background.spawn(self._start(image_to_start), f"start a spare {image_to_start}"))

    async def check(self) -> None:
        """Ask each spare for a sign of life."""
        for spare in [spare for spares in self._spares.values() for spare in spares]:
            if not await spare.answers() and spare in self._spares.get(spare.image, ()):
                self._spares[spare.image].remove(spare)
                self.end(spare)

    def _candidates(self) -> list[str]:
        return [image for image in {*self._eager, *self._claims} if self.unfit(image) is None]

    def _wanted(self, image: str, window_s: float) -> int:
        since = self._clock() - window_s
        recent = sum(1 for at in self._claims.get(image, ()) if at > since)
        least = self.settings.min if image in self._eager else 0
        return min(least + recent, self.settings.max)

    def _next(self) -> str | None:
        """The image to start one of now, if one is to be started."""
        if self.closed or self._clock() < self._not_before or not self._may_start() or not self._cool():
            return None
        held = self.spares()
        if len(held) >= self.settings.max:
            return None
        if sum(spare.memory_mb for spare in held) + self._maker.expected_mb > self.settings.memory_mb:
            return None
        missing = {
            image: self._wanted(image, RISE_S) - len(self._spares.get(image, ())) for image in self._candidates()
        }
        image = max(sorted(missing), key=lambda name: missing[name], default=None)
        return image if image is not None and missing[image] > 0 else None

    def _cool(self) -> bool:
        """Few calls run; or many have been running for so long that waiting further would leave the pool empty for ever."""
        now = self._clock()
        if self._hot() and now - self._cool_since < PATIENCE_S:
            return False
        self._cool_since = now
        return True

    async def _start(self, image: str) -> None:
        self.starting = spare = self._maker.new(image)
        try:
            await self._maker.start(spare)
        except RuntimeUnavailable as problem:
            self._failed(image, problem)
        else:
            self._failures_in_row = 0
            if not spare.bindable:
                self._unfit[image] = "its image can't be bound to a session after its start"
                self.end(spare)
            elif self.closed:
                self.end(spare)
            else:
                self._spares.setdefault(image, deque()).append(spare)
        finally:
            self.starting = None

    def _failed(self, image: str, problem: RuntimeUnavailable) -> None:
        pause_s = min(FIRST_PAUSE_S * 2**self._failures_in_row, LONGEST_PAUSE_S)
        self._failures_in_row += 1
        self.failures += 1
        self._not_before = self._clock() + pause_s
        fields = {"image": image, "problem": str(problem), "again_in_s": pause_s}
        _log.warning("spare_not_started", extra={"fields": fields})

    def end(self, spare: Spare) -> None:
        """In the background."""
        self._background.spawn(self._maker.end(spare), f"end {spare.spec.sandbox_id}")

    def stop(self) -> None:
        """Start nothing more, and end all spares in the background. Again: nothing happens."""
        self.closed = True
        for spares in self._spares.values():
            while spares:
                self.end(spares.popleft())

    async def close(self, timeout_s: float) -> None:
        """Wait for the end of all. A start under way is waited for and ended with what it started."""
        self.stop()
        await self._background.finish(timeout_s)
