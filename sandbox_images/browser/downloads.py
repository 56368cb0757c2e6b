"""What the browser downloads: bounded, then put into the workspace under a free name."""

from __future__ import annotations

import asyncio
import mimetypes
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sandbox_images.base.beneath import Workspace
from sandbox_images.base.mcp_stdio import ProtocolError

FOLDER, STAGING = "downloads", ".toolcrib/browser"
MAX_FILE_BYTES = 256 << 20
MAX_FILES, MAX_RUNNING = 64, 4
SHARE = 4  # a file may take this part of what the sandbox may write at most


@dataclass
class Download:
    """`problem`: why it ended without a file. `artifact` as the protocol has it."""

    guid: str
    url: str
    name: str
    received: int = 0
    total: int = 0
    problem: str | None = None
    artifact: dict[str, Any] | None = None

    @property
    def ended(self) -> bool:
        return self.problem is not None or self.artifact is not None


class Downloads:
    """`cancel` stops one in the browser, by its guid."""

    def __init__(self, root: str, cancel: Callable[[str], None]) -> None:
        self._root, self._cancel = root, cancel
        self.workspace = Workspace(root)
        self._running: dict[str, Download] = {}
        self._ended: list[Download] = []
        self._news = asyncio.Event()
        self.begun = 0
        size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        self.max_bytes = MAX_FILE_BYTES if size == resource.RLIM_INFINITY else min(MAX_FILE_BYTES, size // SHARE)

    def prepare(self) -> str:
        """An empty folder for the browser to write to; its path. Raises OSError."""
        try:
            self.workspace.make_folders(STAGING)
        except ProtocolError as problem:
            raise OSError(problem.message) from problem
        place = os.path.join(self._root, STAGING)
        for name in os.listdir(place):
            with suppress(OSError):
                os.unlink(os.path.join(place, name))
        return place

    def take_ended(self) -> list[Download]:
        """Those that ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def any_news(self) -> bool:
        """Whether one ended that was not told of yet, or is under way."""
        return bool(self._ended or self._running)

    @property
    def running(self) -> list[Download]:
        return list(self._running.values())

    async def wait_for(self, number: int, limit_s: float) -> None:
        """Until so many have begun, or `limit_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.begun < number:
                    self._news.clear()
                    await self._news.wait()

    async def wait(self, limit_s: float) -> None:
        """Until none is under way, or `limit_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._running:
                    self._news.clear()
                    await self._news.wait()

    def abandon(self, why: str) -> None:
        """The browser is gone."""
        for download in list(self._running.values()):
            self._end(download, problem=why)

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        guid = str(params.get("guid"))
        if method == "Browser.downloadWillBegin":
            download = Download(
                guid, str(params.get("url", ""))[:2_000], _safe(str(params.get("suggestedFilename", "")))
            )
            self.begun += 1
            self._running[guid] = download
            self._news.set()
            if len(self._running) > MAX_RUNNING:
                self._refuse(download, f"more than {MAX_RUNNING} downloads at a time")
            elif self.begun > MAX_FILES:
                self._refuse(download, f"more than {MAX_FILES} downloads in this session")
            return
        found = self._running.get(guid)
        if found is None:
            return
        found.received, found.total = int(params.get("receivedBytes", 0)), int(params.get("totalBytes", 0))
        if params.get("state") == "completed":
            self._finish(found)
        elif params.get("state") == "canceled":
            self._end(found, problem="it broke off: the connection ended, or the disk is full")
        elif max(found.received, found.total) > self.max_bytes:
            self._refuse(found, f"it is larger than {self.max_bytes >> 20} MiB")

    def _refuse(self, download: Download, why: str) -> None:
        self._cancel(download.guid)
        self._end(download, problem=why)

    def _end(self, download: Download, *, problem: str | None = None) -> None:
        self._running.pop(download.guid, None)
        download.problem = problem
        self._ended = [*self._ended, download][-MAX_FILES:]
        self._news.set()
        if problem is not None:
            for ending in ("", ".crdownload"):
                with suppress(OSError):
                    os.unlink(os.path.join(self._root, STAGING, download.guid + ending))

    def _finish(self, download: Download) -> None:
        try:
            download.artifact = self._place(download)
            self._end(download)
        except (OSError, ProtocolError) as problem:
            self._end(download, problem=f"it could not be put into the workspace ({problem})")

    def _place(self, download: Download) -> dict[str, Any]:
        self.workspace.make_folders(FOLDER)
        stem, dot, ending = download.name.rpartition(".")
        with self.workspace.folder(STAGING) as source, self.workspace.folder(FOLDER) as target:
            about = os.lstat(download.guid, dir_fd=source)
            if not stat.S_ISREG(about.st_mode):
                raise OSError("it is no file any more")
            for number in range(1_000):
                name = (
                    download.name
                    if not number
                    else f"{stem}-{number}.{ending}"
                    if dot and stem
                    else f"{download.name}-{number}"
                )
                with suppress(FileExistsError):
                    os.link(download.guid, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                    break
            else:
                raise OSError("no free name")
            os.unlink(download.guid, dir_fd=source)
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return {"path": f"{FOLDER}/{name}", "bytes": about.st_size, "media_type": kind}

    def remove_staging(self) -> None:
        with suppress(OSError):
            shutil.rmtree(os.path.join(self._root, STAGING))


def _safe(name: str) -> str:
    """A page chooses the name: no folders, nothing hidden, no odd characters."""
    name = re.sub(r"[^\w .()+=@,-]", "_", os.path.basename(name.replace("\\", "/"))).strip(" .")
    stem, dot, ending = name.rpartition(".")
    name = f"{stem[:120]}.{ending[:16]}" if dot and stem else name[:120]
    return name or "download"
