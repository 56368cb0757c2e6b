"""What a run may use: allowances that only ever fall, reserved before each call and settled after it.

The ledger is a fold over the journal: `apply` is the only way anything is spent, so a resumed run goes on with what is
left. Seconds count while a process works on the run; the time between two processes does not. A request whose reply was
never journalled stays charged at its reservation: the server may have billed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.errors import BudgetExhausted
from agent.events import Event, EventKind
from agent.settings import BudgetSettings, LoopSettings

MIN_REPLY_TOKENS = 64  # a reply that may be no longer than this can't hold a useful call
MAX_GAP_S = (
    3600.0  # between two events of one process; no step takes longer unless the clock was set or the machine slept
)
EXTRA_ACTOR_CALLS = 9  # of one attempt: text, empty, cut and broken replies two each, one overflow

# failures before which the server can't have billed anything; all others without usage are charged at the reservation
_FREE_FAILURES = frozenset({"unreachable", "refused", "rate_limited", "overflow"})


@dataclass(frozen=True)
class Bound:
    """The most calls a run can make, whatever the model says. Printed before the start and enforced as an allowance."""

    llm_calls: int
    tool_calls: int


def worst_case(loop: LoopSettings) -> Bound:
    """Every task fails in every attempt with every reply as bad as it can be; see docs/decisions/termination-bound.md."""
    ask = 1 + loop.max_corrections
    attempts = loop.max_tasks * (1 + loop.max_revisions)
    actor = loop.max_steps + EXTRA_ACTOR_CALLS
    attempt = actor + ask + ask + loop.max_refinements * ask  # actor, critic, reflector, refiner
    # the last step of an attempt offers no tool but subtask_submit
    llm_calls = ask + attempts * attempt + loop.max_summaries + ask
    return Bound(llm_calls, attempts * (loop.max_steps - 1) * loop.max_calls_per_step)


@dataclass(frozen=True)
class Allowances:
    """None: not limited. `llm_calls` and `tool_calls` are never above the bound."""

    llm_calls: int
    tool_calls: int
    tokens: int | None = None
    usd: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, budget: BudgetSettings, bound: Bound) -> Allowances:
        return cls(
            llm_calls=min(bound.llm_calls, budget.max_llm_calls or bound.llm_calls),
            tool_calls=min(bound.tool_calls, budget.max_tool_calls or bound.tool_calls),
            tokens=budget.max_tokens,
            usd=budget.max_usd,
            seconds=budget.max_seconds,
        )


@dataclass(frozen=True)
class Cost:
    """What was used. Cached prompt tokens count once, as tokens; their lower price shows in `usd`."""

    llm_calls: int = 0
    tool_calls: int = 0
    tokens: int = 0
    usd: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.llm_calls + other.llm_calls,
            self.tool_calls + other.tool_calls,
            self.tokens + other.tokens,
            self.usd + other.usd,
        )


@dataclass
class Ledger:
    """Pure fold of the spending events. `by_key` has the cost of each key, for the cost of a task."""

    total: Cost = field(default_factory=Cost)
    seconds: float = 0.0
    by_key: dict[str, Cost] = field(default_factory=dict)
    _open: dict[str, Cost] = field(default_factory=dict)
    _last_at: float | None = None

    def apply(self, event: Event) -> None:
        self._count_seconds(event)
        data = event.data
        match event.kind:
            case EventKind.LLM_REQUESTED:
                reserved = data.get("reserved") or {}
                tokens, usd = int(reserved.get("tokens", 0)), float(reserved.get("usd", 0.0))
                self._open[data["key"]] = Cost(tokens=tokens, usd=usd)
                self._charge(data["key"], Cost(llm_calls=1, tokens=tokens, usd=usd))
            case EventKind.LLM_REPLIED:
                self._settle(data["key"], Cost(tokens=_tokens(data.get("usage")), usd=float(data.get("usd") or 0.0)))
            case EventKind.LLM_FAILED:
                if data.get("usage") is not None:
                    self._settle(data["key"], Cost(tokens=_tokens(data["usage"]), usd=float(data.get("usd") or 0.0)))
                elif data.get("code") in _FREE_FAILURES:
                    self._settle(data["key"], Cost())
                else:
                    self._open.pop(data["key"], None)
            case EventKind.TOOL_INTENDED:
                if data["key"] not in self._open:  # the same call, sent again after a crash, is one call
                    self._open[data["key"]] = Cost()
                    self._charge(data["key"], Cost(tool_calls=1))

    def _charge(self, key: str, cost: Cost) -> None:
        self.total += cost
        self.by_key[key] = self.by_key.get(key, Cost()) + cost

    def _settle(self, key: str, actual: Cost) -> None:
        reserved = self._open.pop(key, Cost())
        self._charge(key, Cost(tokens=actual.tokens - reserved.tokens, usd=actual.usd - reserved.usd))

    def _count_seconds(self, event: Event) -> None:
        if event.kind in {EventKind.RUN_STARTED, EventKind.RUN_RESUMED}:
            self._last_at = event.at
        elif self._last_at is not None:
            gap = event.at - self._last_at  # a clock that was set back costs nothing, one set forward a bounded time
            self.seconds += min(max(0.0, gap), MAX_GAP_S)
            self._last_at = event.at


def _tokens(usage: dict[str, Any] | None) -> int:
    return 0 if usage is None else int(usage.get("prompt_tokens", 0)) + int(usage.get("completion_tokens", 0))


@dataclass(frozen=True)
class Reservation:
    """`max_tokens` of the reply, lowered to what is left; `tokens` and `usd` are set aside until the reply is journalled."""

    max_tokens: int
    tokens: int
    usd: float


class Budget:
    """Allowances against the ledger. The caller feeds every event of the run to `apply`, old ones first."""

    def __init__(self, allowances: Allowances, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowances, self.ledger = allowances, Ledger()
        self._clock = clock
        self._started: float | None = None
        self._seconds_before = 0.0

    def apply(self, event: Event) -> None:
        if event.kind in {EventKind.RUN_STARTED, EventKind.RUN_RESUMED}:
            self._seconds_before, self._started = self.ledger.seconds, self._clock()
        self.ledger.apply(event)

    @property
    def seconds(self) -> float:
        """Seconds of work so far, this process by the monotonic clock."""
        return self._seconds_before + (0.0 if self._started is None else self._clock() - self._started)

    @property
    def seconds_left(self) -> float | None:
        limit = self.allowances.seconds
        return None if limit is None else max(0.0, limit - self.seconds)

    def reserve_llm(self, prompt_tokens: int, max_tokens: int, price: Callable[[int, int], float]) -> Reservation:
        """Room for one request; `price(prompt_tokens, completion_tokens)` in dollars.

        Raises BudgetExhausted when a reply of MIN_REPLY_TOKENS (or of `max_tokens`, if that is less) no longer fits.
        """
        self._check_seconds()
        spent, allowed = self.ledger.total, self.allowances
        if spent.llm_calls >= allowed.llm_calls:
            raise _exhausted("llm_calls", f"{spent.llm_calls} of {allowed.llm_calls} model calls are used")
        least = min(MIN_REPLY_TOKENS, max_tokens)
        if allowed.tokens is not None:
            left = allowed.tokens - spent.tokens - prompt_tokens
            if left < least:
                raise _exhausted(
                    "tokens",
                    f"{spent.tokens} of {allowed.tokens} tokens are used and the next request needs {prompt_tokens + least}",
                )
            max_tokens = min(max_tokens, left)
        if allowed.usd is not None:
            left_usd, base = allowed.usd - spent.usd, price(prompt_tokens, 0)
            full = price(prompt_tokens, max_tokens)
            if full > left_usd:
                per_token = (full - base) / max_tokens
                max_tokens = int((left_usd - base) / per_token) if per_token > 0 else 0
                if max_tokens < least:
                    raise _exhausted(
                        "usd", f"${spent.usd:.4f} of ${allowed.usd:.4f} are spent and the next request does not fit"
                    )
        return Reservation(max_tokens, prompt_tokens + max_tokens, price(prompt_tokens, max_tokens))

    def reserve_tool_call(self) -> None:
        """Raises BudgetExhausted when no further tool call may be made. The call is charged by its TOOL_INTENDED."""
        self._check_seconds()
        spent, allowed = self.ledger.total.tool_calls, self.allowances.tool_calls
        if spent >= allowed:
            raise _exhausted("tool_calls", f"{spent} of {allowed} tool calls are used")

    def _check_seconds(self) -> None:
        left = self.seconds_left
        if left is not None and left <= 0:
            raise self.out_of_time()

    def out_of_time(self) -> BudgetExhausted:
        return _exhausted("seconds", f"the run's {self.allowances.seconds:g} seconds are used up")


def _exhausted(allowance: str, what: str) -> BudgetExhausted:
    return BudgetExhausted(allowance, f"stopped by the budget: {what}. Resume with a higher allowance to go on.")
