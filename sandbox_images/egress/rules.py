"""A door's policy, as the server sends it: canonical rules, matched by host and port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sandbox_images.egress.problems import Refused
from sandbox_images.egress.target import Target


@dataclass(frozen=True)
class Policy:
    """mode: none, allow or open. rules: `host:port`, `*.host:port`, `host:*`, `[IPv6]:port`, only for `allow`."""

    mode: str = "none"
    rules: frozenset[str] = frozenset()

    @classmethod
    def load(cls, told: Any) -> Policy:
        """Raises ValueError: a policy that can't be read allows nothing."""
        if not isinstance(told, dict) or told.get("mode") not in ("none", "allow", "open"):
            raise ValueError("policy: mode is none, allow or open")
        rules = told.get("allow", [])
        if not isinstance(rules, list) or not all(isinstance(rule, str) and ":" in rule for rule in rules):
            raise ValueError("policy: allow is a list of host:port")
        return cls(told["mode"], frozenset(rules) if told["mode"] == "allow" else frozenset())

    def check(self, target: Target) -> None:
        """Raises Refused."""
        if self.mode == "none":
            raise Refused("none", target.host, target.port, f"{target} is refused: this session may not reach out.")
        if self.mode == "allow" and not self._lists(target):
            reason = f"{target} is refused: it is not among the hosts and ports that this session may reach."
            raise Refused("not_allowed", target.host, target.port, reason)

    def _lists(self, target: Target) -> bool:
        hosts = [target.shown_host]
        if not target.is_address:
            labels = target.host.split(".")
            hosts += [f"*.{'.'.join(labels[start:])}" for start in range(1, len(labels))]
        return any(f"{host}:{port}" in self.rules for host in hosts for port in (target.port, "*"))
