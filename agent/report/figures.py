"""Times, sizes, counts and money for people."""

from __future__ import annotations


def duration(ms: float) -> str:
    """Such as 340 ms, 4.2 s, 3 min 07 s, 2 h 05 min."""
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 59_950:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int) -> str:
    """Such as 312 B, 4.1 KiB, 2.0 MiB."""
    if count < 1024:
        return f"{count} B"
    value = count / 1024
    for unit in ("KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def count(number: int, what: str) -> str:
    """Such as 1 tool call, 12 tool calls."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def money(usd: float, *, known: bool) -> str:
    """Such as $0.0123; `known` false: at least one model's price is unknown, so the sum lacks something."""
    if known:
        return f"${usd:,.4f}"
    return f"at least ${usd:,.4f}" if usd else "cost unknown"
