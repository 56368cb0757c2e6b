"""Our own id of a call, the same after every crash and retry: it is the Idempotency-Key, so the ToolServer runs it once."""

from __future__ import annotations

import re
from hashlib import sha256

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_-]+")
MAX_CHARS = 128  # of the contract: letters, digits, "-" and "_"


def call_id_of(run_id: str, key: str, attempt: int = 0) -> str:
    """`attempt` 1 names the one repetition of a call whose outcome is unknown."""
    parts = (run_id, key, str(attempt))
    digest = sha256("\0".join(f"{len(part)}:{part}" for part in parts).encode("utf-8", "surrogatepass")).hexdigest()
    readable = _NOT_ALLOWED.sub("-", f"{run_id[:32]}-{key[:40]}").strip("-")
    return f"{readable}-{digest[:40]}".lstrip("-")[-MAX_CHARS:]
