"""Pictures for the report, as data URIs, each embedded once and all of them within a limit."""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

MAX_PICTURE_BYTES = 4 * 1024 * 1024
MAX_TOTAL_BYTES = 16 * 1024 * 1024

_SIGNATURES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


@dataclass(frozen=True)
class Picture:
    """`uri` is empty for a picture that is shown elsewhere on the page (`shown_at` names its anchor) or that is too large."""

    name: str
    anchor: str
    bytes: int
    uri: str = ""
    shown_at: str = ""


@dataclass
class Album:
    """Hands out pictures. The kind is read from a picture's first bytes, never from its name."""

    left: int = MAX_TOTAL_BYTES
    _anchors: dict[str, str] = field(default_factory=dict)

    def from_bytes(self, name: str, data: bytes) -> Picture | None:
        """None when `data` is no picture that a browser shows."""
        media_type = _media_type(data)
        if media_type is None:
            return None
        digest = hashlib.sha256(data).hexdigest()[:16]
        if digest in self._anchors:
            return Picture(name, "", len(data), shown_at=self._anchors[digest])
        if len(data) > min(self.left, MAX_PICTURE_BYTES):
            return Picture(name, "", len(data))
        self.left -= len(data)
        self._anchors[digest] = anchor = f"picture-{digest}"
        return Picture(name, anchor, len(data), f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}")

    def from_base64(self, name: str, text: str) -> Picture | None:
        try:
            return self.from_bytes(name, base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            return None

    def from_workspace(self, workspace: Path, path: str) -> Picture | None:
        """The picture at `path`, which came from a walk of `workspace` that follows no links."""
        try:
            handle = os.open(workspace / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with open(handle, "rb") as file:  # noqa: PTH123 - a handle, opened without following links
            if os.fstat(handle).st_size > MAX_PICTURE_BYTES:
                return Picture(path, "", os.fstat(handle).st_size)
            return self.from_bytes(path, file.read(MAX_PICTURE_BYTES + 1))


def _media_type(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _SIGNATURES.items() if data.startswith(signature)), None)
