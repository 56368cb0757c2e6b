"""The session's browser: started when first needed, started anew when it died, with a bounded number of tabs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from sandbox_images.base.outcome import Ended, Outcome, failed
from sandbox_images.browser import chromium
from sandbox_images.browser.chromium import Chromium
from sandbox_images.browser.devtools import CommandFailed, Gone, Unresponsive
from sandbox_images.browser.downloads import Downloads
from sandbox_images.browser.tab import CLOSED, Tab

MAX_TABS = 8
MAX_POPUPS = 12  # of one call; a page that opens more is closed
START_TIMEOUT_S = 30.0
NO_PROGRAM = (
    "There is no Chromium here. On a server with Docker: toolserver images build browser. On one with bubblewrap: "
    "install the Debian package on its machine (apt-get install chromium-headless-shell)."
)


class Browser:
    """One call at a time uses it. Call `close` at the end."""

    def __init__(self, root: str) -> None:
        self._chromium: Chromium | None = None
        self._tabs: dict[str, Tab] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next, self._popups = 1, 0
        self._born = asyncio.Event()
        self.current: Tab | None = None
        self.downloads = Downloads(root, self._cancel_download)
        self._last_words: list[str] = []  # of the page that went last
        self.lost: str | None = None  # why the pages of an earlier browser are gone, until somebody was told

    @property
    def tabs(self) -> list[Tab]:
        return sorted(self._tabs.values(), key=lambda tab: tab.number)

    def begin(self) -> None:
        """A new call."""
        self._popups = 0
        self._last_words.clear()
        for tab in self._tabs.values():
            tab.begin()

    async def page(self) -> Tab:
        """The tab that is shown; an empty one at first. Raises Ended when there can be none."""
        if self._chromium is None or not self._chromium.runs:
            await self._start()
        while self.current is not None and self.current.crashed:
            await self.drop(self.current)
        if self.current is None:
            await self._new_tab()
        assert self.current is not None
        return self.current

    async def living(self) -> Tab | None:
        """The tab that is shown, None when none is. Raises Gone when its page has crashed; it is put away then."""
        tab = self.current
        if tab is not None and tab.crashed:
            await self.drop(tab)
            raise Gone
        return tab

    def show(self, number: int) -> Tab:
        """Raises Ended when there is no such tab."""
        for tab in self._tabs.values():
            if tab.number == number:
                self.current = tab
                return tab
        numbers = ", ".join(str(tab.number) for tab in self.tabs)
        raise failed(f"There is no tab {number}. Open: {numbers or 'none'}.")

    async def drop(self, tab: Tab) -> None:
        """Close it, also when its page does not answer."""
        assert self._chromium is not None
        await tab.crash()
        with suppress(CommandFailed, Unresponsive, Gone):
            await self._chromium.devtools.ask("Target.closeTarget", {"targetId": tab.target}, timeout_s=3)
        self._forget(tab.session)

    def why_gone(self) -> Outcome:
        """What to say when the page went while it was used."""
        if self._last_words:
            return Outcome("failed", " ".join(self._last_words))
        if self._chromium is not None and self._chromium.out_of_memory():
            return Outcome(
                "oom",
                "The page used up the memory of the sandbox and was ended. Its state is lost; the browser works on. "
                "A session with more memory_mb may hold it.",
            )
        return Outcome(
            "crashed", "The page crashed: it may have used up its memory. Its state is lost; the browser works on."
        )

    async def stop(self, why: str) -> None:
        """End the browser; the next call starts another."""
        gone, self._chromium = self._chromium, None
        self._tabs.clear()
        self.current = None
        self.downloads.abandon("the browser ended")
        if gone is not None:
            self.lost = why
            await gone.kill()
        _end_orphans()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.stop("it was closed")
        self.downloads.remove_staging()

    # ---- starting

    async def _start(self) -> None:
        if not chromium.installed():
            raise failed(NO_PROGRAM)
        if self._chromium is not None:
            memory = self._chromium.out_of_memory()
            await self.stop("it ran out of memory" if memory else "it crashed")
        try:
            place = await asyncio.to_thread(self.downloads.prepare)
            self._chromium = await chromium.start(self._on_event, self._on_gone)
            devtools = self._chromium.devtools
            async with asyncio.timeout(START_TIMEOUT_S):
                await devtools.ask("Browser.getVersion", timeout_s=START_TIMEOUT_S)
                behaviour = {"behavior": "allowAndName", "downloadPath": place, "eventsEnabled": True}
                await devtools.ask("Browser.setDownloadBehavior", behaviour)
                only_pages = [{"type": "page", "exclude": False}, {"exclude": True}]
                attach = {"autoAttach": True, "waitForDebuggerOnStart": True, "flatten": True, "filter": only_pages}
                await devtools.ask("Target.setAutoAttach", attach)
        except (OSError, TimeoutError, Gone, Unresponsive, CommandFailed) as problem:
            await self.stop("it did not start")
            raise Ended(
                Outcome(
                    "crashed",
                    f"Chromium did not start ({str(problem) or type(problem).__name__}). Trying again may help; it needs about "
                    "512 MiB of memory, 128 processes, and room in the workspace.",
                )
            ) from problem

    async def _new_tab(self) -> None:
        assert self._chromium is not None
        self._born.clear()
        try:
            await self._chromium.devtools.ask("Target.createTarget", {"url": "about:blank"})
            async with asyncio.timeout(START_TIMEOUT_S):
                while self.current is None:
                    await self._born.wait()
                    self._born.clear()
        except (CommandFailed, Unresponsive, Gone, TimeoutError) as problem:
            await self.stop("it did not answer any more")
            raise Ended(
                Outcome("crashed", "The browser did not answer any more and was ended. Try again.")
            ) from problem

    # ---- events

    def _on_event(self, session: str | None, method: str, params: dict[str, Any]) -> None:
        if session is not None:
            tab = self._tabs.get(session)
            if tab is not None:
                tab.on_event(method, params)
        elif method == "Target.attachedToTarget":
            self._on_attached(params)
        elif method == "Target.detachedFromTarget":
            self._forget(str(params.get("sessionId")))
        elif method.startswith("Browser.download"):
            self.downloads.on_event(method, params)

    def _on_attached(self, params: dict[str, Any]) -> None:
        assert self._chromium is not None
        info, session = params["targetInfo"], str(params["sessionId"])
        opener = self.current
        if len(self._tabs) >= MAX_TABS or (opener is not None and self._popups >= MAX_POPUPS):
            if opener is not None:
                opener.note(f"The page opened more tabs than the {MAX_TABS} there may be; they were closed.")
            self._spawn(self._turn_away(session, str(info["targetId"])))
            return
        tab = Tab(self._next, str(info["targetId"]), session, self._chromium.devtools, self._spawn)
        self._next += 1
        self._tabs[session] = tab
        if opener is not None:
            self._popups += 1
            if self._popups == 1:
                tab.notes = [
                    *opener.notes,
                    f"A new tab was opened and is shown now; tab {opener.number} is still there.",
                ]
        self._spawn(self._set_up(tab))

    async def _set_up(self, tab: Tab) -> None:
        with suppress(Gone, Unresponsive):
            await tab.set_up()
            if self.current is None or self._popups == 1:
                self.current = tab
        self._born.set()

    async def _turn_away(self, session: str, target: str) -> None:
        assert self._chromium is not None
        ask = self._chromium.devtools.ask
        for command in (
            # one that waits to begin holds up all pages of its process
            ask("Runtime.runIfWaitingForDebugger", session=session, timeout_s=5),
            ask("Target.closeTarget", {"targetId": target}, timeout_s=5),
        ):
            with suppress(CommandFailed, Unresponsive, Gone):
                await command

    def _forget(self, session: str) -> None:
        tab = self._tabs.pop(session, None)
        if tab is None:
            return
        tab.devtools.session_gone(session)
        self._last_words = [note for note in tab.notes if note.endswith(CLOSED)]
        if self.current is tab:
            self.current = self.tabs[-1] if self._tabs else None
            if self.current is not None:
                self.current.note(f"Tab {tab.number} was closed; tab {self.current.number} is shown now.")

    def _on_gone(self) -> None:
        for tab in self._tabs.values():
            tab.crashed = True
        self._tabs.clear()
        self.current = None
        self.downloads.abandon("the browser ended")

    def _cancel_download(self, guid: str) -> None:
        async def work() -> None:
            with suppress(CommandFailed, Unresponsive, Gone):
                assert self._chromium is not None
                await self._chromium.devtools.ask("Browser.cancelDownload", {"guid": guid})

        self._spawn(work())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _end_orphans() -> None:
    """What Chromium left behind has become a child of the first process of the sandbox: nobody else ends or reaps it."""
    if os.getpid() != 1:
        return
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or entry == "1":
            continue
        with suppress(OSError):
            if os.readlink(f"/proc/{entry}/exe").startswith(os.path.dirname(chromium.PROGRAM)):
                os.kill(int(entry), signal.SIGKILL)
