"""Bounds of a door. Each can be lowered or raised for one door by its `open`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Limits:
    """connections: open at a time. head_bytes: a request's head. connection_bytes: each way, of one connection.
    door_bytes: both ways together, of all. head_s: from the first byte of a head to its last. connect_s: to an answering
    address, TLS included. idle_s: without a byte either way. total_s: a connection's whole life.
    """

    connections: int = 64
    head_bytes: int = 65_536
    connection_bytes: int = 4 << 30
    door_bytes: int = 64 << 30
    head_s: float = 15.0
    connect_s: float = 15.0
    idle_s: float = 300.0
    total_s: float = 3600.0

    def changed(self, told: Any) -> Limits:
        """With what `told` names. Raises ValueError."""
        if not isinstance(told, dict):
            raise ValueError("limits: a table of numbers")  # noqa: TRY004 - one kind for all that is told wrongly
        kinds = {field.name: field.type for field in fields(self)}
        for name, value in told.items():
            if name not in kinds:
                raise ValueError(f"limits: there is no {name!r}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"limits: {name} is a number above 0")
        return replace(self, **{name: int(value) if kinds[name] == "int" else value for name, value in told.items()})
