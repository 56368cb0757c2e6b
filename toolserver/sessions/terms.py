"""The terms under which this server uses sandboxes: each later one fences off what was sent under the earlier ones."""

from __future__ import annotations

from toolserver.sandbox.tool_sandbox import Term

_IN_ONE_LIFE = 1_000_000  # a sandbox whose stream broke is attached again in the same life of the server


class Terms:
    """`first` is that of the server's start."""

    def __init__(self, server_epoch: int, lease_s: float) -> None:
        self.first = Term(server_epoch * _IN_ONE_LIFE, lease_s)
        self._latest = self.first.epoch

    def later(self) -> Term:
        """One that is later than all before it."""
        self._latest += 1
        return Term(self._latest, self.first.lease_s)
