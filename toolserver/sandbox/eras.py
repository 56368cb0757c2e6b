"""The two eras of MCP, the versions of each, and which one an image was found to speak.

Legacy versions begin with `initialize`; the modern one has no such beginning, each request says what it speaks. Why the server
asks as it does: docs/decisions/mcp-eras.md.
"""

from __future__ import annotations

from collections.abc import Callable

from toolserver.runtime.base import SandboxSpec

LEGACY_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # latest first
LATEST_LEGACY = LEGACY_VERSIONS[0]
MODERN_VERSION = "2026-07-28"
_MOST = 1000

Key = tuple[str, tuple[str, ...]]


def is_modern(version: str) -> bool:
    return version not in LEGACY_VERSIONS


class Eras:
    """What each image answered last, by its reference (a digest where it is pinned) and its command. Never more than a hint.

    `learned` is told of what is new: the image's name in the catalog and the version.
    """

    def __init__(self, learned: Callable[[str, str], None] = lambda _image, _version: None) -> None:
        self._known: dict[Key, str] = {}
        self._learned = learned

    def hint(self, spec: SandboxSpec) -> str | None:
        """The version to begin with; None: nobody knows. Our own images are known to speak the legacy one."""
        return self._known.get(_key(spec)) or (None if spec.foreign else LATEST_LEGACY)

    def tell(self, spec: SandboxSpec, version: str) -> None:
        """What is stored of an image, at the server's start; no news."""
        self._known[_key(spec)] = version

    def remember(self, spec: SandboxSpec, version: str) -> None:
        if self._known.get(_key(spec)) == version:
            return
        self._known[_key(spec)] = version
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]
        if spec.foreign:
            self._learned(spec.image, version)


def _key(spec: SandboxSpec) -> Key:
    return spec.reference, tuple(spec.command)
