"""Which addresses are opened."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from sandbox_images.base.outcome import denied, invalid

PORTS = {"http": 80, "https": 443}
MAX_CHARS = 8_192


def openable(text: str) -> str:
    """The address as the browser takes it. Raises Ended: `denied` for other schemes, `invalid` for what is no address."""
    text = text.strip()
    if not text or len(text) > MAX_CHARS or re.search(r"[\x00-\x20\x7f]", text):
        raise invalid("/url", f"must be a web address of at most {MAX_CHARS} characters, without spaces")
    scheme = text.partition(":")[0].lower() if ":" in text else ""
    if scheme not in PORTS:
        if scheme and re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme) and not re.match(r"[a-z0-9.-]+:\d+(/|$)", text):
            raise denied(f"Only http and https addresses are opened, not {scheme[:40]!r}.")
        raise invalid("/url", "must be a whole web address that begins with http:// or https://")
    try:
        parts = urlsplit(text)
        known = parts.hostname, parts.port
    except ValueError as problem:
        raise invalid("/url", f"is no web address: {problem}") from problem
    if not known[0]:
        raise invalid("/url", "names no host")
    return text


def host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return parts.hostname or "", parts.port or PORTS.get(parts.scheme, 443)
