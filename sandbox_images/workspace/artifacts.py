"""Files of our own in the workspace, below .toolcrib/: whole outputs, large pictures."""

from __future__ import annotations

import os
import re

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.mcp_stdio import ProtocolError
from sandbox_images.workspace.output import Spool
from sandbox_images.workspace.quota import Quota
from sandbox_images.workspace.workspace_scan import OWN_FOLDER

OUTPUT_FOLDER = f"{OWN_FOLDER}/output"
MAX_SPOOL_BYTES = 256 << 20
ENDINGS = {"text/plain": "txt", "text/html": "html", "image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg"}


class Artifacts:
    def __init__(self, workspace: Workspace, quota: Quota) -> None:
        self._workspace, self._quota = workspace, quota

    def spool(self, name: str) -> Spool:
        return Spool(lambda: self._create(name, "text/plain"), self._room)

    def save(self, name: str, media_type: str, data: bytes) -> dict[str, object] | None:
        """Write a file and describe it as the outcome does; None when there is no room for it."""
        spool = Spool(lambda: self._create(name, media_type), self._room)
        spool.write(data)
        spool.close()
        if spool.incomplete:
            return None
        return {"path": spool.path, "bytes": spool.bytes, "media_type": media_type}

    def _room(self) -> int:
        """At most a quarter of the quota, and what is left of it."""
        limit = self._quota.limit_bytes
        return min(MAX_SPOOL_BYTES, limit // 4, max(0, limit - self._quota.snapshot.bytes))

    def _create(self, name: str, media_type: str) -> tuple[int, str]:
        """Raises OSError."""
        safe = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80] or "output"
        ending = ENDINGS.get(media_type, "bin")
        for number in range(1000):
            path = f"{OUTPUT_FOLDER}/{safe}{f'-{number}' if number else ''}.{ending}"
            try:
                return self._workspace.create(path, os.O_WRONLY), path
            except FileExistsError:
                continue
            except ProtocolError as problem:
                raise OSError(problem.message) from problem
        raise OSError("no free name")
