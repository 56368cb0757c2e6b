"""Headers with a secret that the proxy puts into requests to named hosts, so that the sandbox never has it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sandbox_images.egress.target import Target, read_authority

USUAL_PORTS = (80, 443)
MIN_REDACTED = 8  # what is shorter would be found in texts by chance
_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_NEVER = frozenset({"host", "connection", "content-length", "transfer-encoding", "upgrade", "expect", "te", "trailer"})


@dataclass(frozen=True)
class SecretHeader:
    """`port` None: the usual ones, 80 and 443. `secret` is the part of `value` that nobody may see."""

    host: str
    port: int | None
    name: str
    value: str = field(repr=False)
    secret: str = field(repr=False)

    @classmethod
    def load(cls, told: Any) -> SecretHeader:
        """From `{"host", "header", "prefix"?, "secret"}`. Raises ValueError, without the value."""
        if not isinstance(told, dict) or not all(
            isinstance(told.get(key), str) for key in ("host", "header", "secret")
        ):
            raise ValueError("headers: a list of host, header, prefix and secret")
        name, secret, prefix = told["header"], told["secret"], told.get("prefix") or ""
        if not _NAME.fullmatch(name) or name.lower() in _NEVER:
            raise ValueError(f"headers: {name[:100]!a} is no name of a header that may be set")
        if not isinstance(prefix, str) or not secret or not _VALUE.fullmatch(prefix + secret):
            raise ValueError(f"headers: the value for {name} is empty, or holds a sign that no header can have")
        try:
            target = read_authority(told["host"], 443)
        except Exception as problem:
            raise ValueError(f"headers: {told['host'][:100]!a} is no host: {problem}") from problem
        named = told["host"].endswith(f":{target.port}") and not told["host"].endswith("]")
        return cls(target.host, target.port if named else None, name, prefix + secret, secret)

    def fits(self, target: Target) -> bool:
        ports = USUAL_PORTS if self.port is None else (self.port,)
        return self.host == target.host and target.port in ports


class Redaction:
    """Replaces secrets by stars in what passes, of the same length. Keeps back what may be the beginning of one."""

    def __init__(self, headers: list[SecretHeader]) -> None:
        secrets = {header.secret.encode() for header in headers if len(header.secret) >= MIN_REDACTED}
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._longest = len(self._secrets[0]) if self._secrets else 0
        self._kept = b""

    def whole(self, text: bytes) -> bytes:
        for secret in self._secrets:
            text = text.replace(secret, b"*" * len(secret))
        return text

    def feed(self, data: bytes) -> bytes:
        """What may go on now."""
        if not self._secrets:
            return data
        text = self.whole(self._kept + data)
        keep = self._beginning(text)
        self._kept = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept

    def _beginning(self, text: bytes) -> int:
        """How many of the last bytes may begin a secret."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if any(secret.startswith(text[-size:]) for secret in self._secrets):
                return size
        return 0
