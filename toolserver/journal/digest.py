"""Digests of arguments, under a key that stays in the state folder.

A plain hash of short arguments (a file name, a yes or no) is found by trying all of them, and would give away what it stands
for. With the key the digest says nothing to whoever has only the journal, and the server's operator can still show that a
call had these very arguments.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

_BYTES = 32


class ArgumentsDigest:
    def __init__(self, folder: Path) -> None:
        """Takes the key of the journal's folder; makes one at the first time. Raises OSError."""
        self._key = _key(folder / "arguments.key")

    def __call__(self, text: str) -> str:
        """Of arguments as canonical JSON."""
        return hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()


def _key(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) == _BYTES:
        return key
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(_BYTES))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return path.read_bytes()
