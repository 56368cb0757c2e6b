"""One tab: its page, what it did since it was last asked, and our own script in it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_images.browser.devtools import CommandFailed, DevTools, Gone, Unresponsive

SCRIPT_TIMEOUT_S, AFTER_INTERRUPT_S = 6.0, 4.0
NAVIGATION_TIMEOUT_S = 20.0
BEGIN_S, QUIET_S = 0.25, 0.3
MAX_DIALOGS = 20
MAX_NAVIGATIONS = 20
MAX_ATTEMPTS = 4  # of a script in a page that moves on
MAX_NOTES = 12
CLOSED = ", so it was closed."  # how a note ends that tells why
_WORLD = "toolcrib"
_SCRIPT = Path(__file__).with_name("page_script.js").read_text(encoding="utf-8")


class ScriptFailed(CommandFailed):
    """Our own script in the page met what it was not made for."""


class Stuck(Exception):  # noqa: N818 - reads as what it names
    """The page does not answer, and could not be made to: the tab is of no more use."""


@dataclass
class Answer:
    """What a server answered for the page itself: header names in lower case."""

    url: str
    status: int
    headers: dict[str, str]

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass
class Tab:
    """`number` is its name for callers. `fresh`: not told of yet. `answer`: None for pages that came from no server."""

    number: int
    target: str
    session: str
    devtools: DevTools
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    url: str = "about:blank"
    title: str = ""
    answer: Answer | None = None
    loading: bool = False
    crashed: bool = False
    navigations: int = 0
    dialogs: int = 0
    notes: list[str] = field(default_factory=list)
    attach_disposition: bool = False
    _context: int | None = None
    _scripts_run: bool = True

    async def set_up(self) -> None:
        """Everything must be in place before the page runs. Raises Gone, Unresponsive."""
        # all at once: a page that waits to begin answers some of them only when it is let go
        asked = [
            self.ask(method, params)
            for method, params in (
                ("Page.enable", {}),
                ("Inspector.enable", {}),
                ("Page.setInterceptFileChooserDialog", {"enabled": True}),
                ("Fetch.enable", {"patterns": [{"resourceType": "Document", "requestStage": "Response"}]}),
                ("Runtime.runIfWaitingForDebugger", {}),
            )
        ]
        for problem in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(problem, BaseException) and not isinstance(problem, CommandFailed):
                raise problem

    async def ask(self, method: str, params: dict[str, Any] | None = None, timeout_s: float = 10.0) -> dict[str, Any]:
        """Raises CommandFailed, Unresponsive, Gone."""
        return await self.devtools.ask(method, params, session=self.session, timeout_s=timeout_s)

    def begin(self) -> None:
        """A new call: what is noted from here on is its own."""
        self.notes.clear()
        self.navigations = self.dialogs = 0

    def note(self, text: str) -> None:
        if text not in self.notes and (len(self.notes) < MAX_NOTES or text.endswith(CLOSED)):
            self.notes.append(text)

    # ---- moving

    async def navigate(self, url: str) -> str | None:
        """The browser's name of what went wrong, such as net::ERR_NAME_NOT_RESOLVED. Raises Unresponsive, Gone, CommandFailed."""
        self.answer = None
        await self.run_scripts(run=True)
        result = await self.ask("Page.navigate", {"url": url}, NAVIGATION_TIMEOUT_S)
        return result.get("errorText") or None

    async def settle(self, limit_s: float) -> bool:
        """Wait until the page is loaded and quiet; whether it became so. One that never does is stopped."""
        until = time.monotonic() + limit_s
        await asyncio.sleep(BEGIN_S)
        quiet_since = time.monotonic()
        while True:
            now = time.monotonic()
            if self.loading:
                quiet_since = now
            if self.crashed or now - quiet_since >= QUIET_S:
                return True
            if now > until or self.navigations > MAX_NAVIGATIONS:
                if self.navigations > MAX_NAVIGATIONS:
                    await self._stop_moving()
                else:
                    await self.stop()
                    self.note("The page was still loading and was stopped.")
                return False
            await asyncio.sleep(0.05)

    async def _stop_moving(self) -> None:
        self.note("The page goes from page to page without end and was stopped.")
        await self.run_scripts(run=False)  # else they go on at once
        await self.stop()

    async def run_scripts(self, *, run: bool) -> None:
        """Whether scripts of pages run in this tab, from here on."""
        if run is not self._scripts_run:
            with suppress(CommandFailed, Unresponsive):
                await self.ask("Emulation.setScriptExecutionDisabled", {"value": not run})
            self._scripts_run = run

    async def stop(self) -> None:
        with suppress(CommandFailed, Unresponsive, Gone):
            await self.ask("Page.stopLoading", timeout_s=3)
        self.loading = False

    # ---- our script in the page

    async def script(self, name: str, *arguments: Any) -> Any:
        """What `crib.name(arguments)` of page_script.js returns. Raises Stuck, Gone, CommandFailed."""
        call = f"crib.{name}({', '.join(json.dumps(argument) for argument in arguments)})"
        for attempt in range(MAX_ATTEMPTS):
            try:
                return await self._evaluate(call)
            except ScriptFailed:
                raise
            except CommandFailed:  # the page went on to another one meanwhile
                self._context = None
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                if attempt == MAX_ATTEMPTS - 2:
                    await self._stop_moving()
                await asyncio.sleep(0.3)
        raise AssertionError("the last attempt returns or raises")

    async def _evaluate(self, expression: str) -> Any:
        try:
            return await self._once(expression, SCRIPT_TIMEOUT_S)
        except Unresponsive:
            pass
        try:
            await self.ask("Runtime.terminateExecution", timeout_s=AFTER_INTERRUPT_S)
            value = await self._once(expression, AFTER_INTERRUPT_S)
        except (Unresponsive, CommandFailed) as problem:
            raise Stuck from problem
        self.note("A script of the page ran without end and was stopped.")
        return value

    async def _once(self, expression: str, timeout_s: float) -> Any:
        context = self._context
        if context is None:
            world = {"frameId": self.target, "worldName": _WORLD}
            context = (await self.ask("Page.createIsolatedWorld", world, timeout_s))["executionContextId"]
            await self.ask("Runtime.evaluate", {"expression": _SCRIPT, "contextId": context}, timeout_s)
            self._context = context
        params = {"expression": expression, "contextId": context, "returnByValue": True}
        answer = await self.ask("Runtime.evaluate", params, timeout_s)
        if "exceptionDetails" in answer:
            said = answer["exceptionDetails"].get("exception", {}).get("description", "")
            raise ScriptFailed(f"our script in the page failed: {said[:200]}")
        return answer["result"].get("value")

    # ---- events

    def on_event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Fetch.requestPaused":
            self.spawn(self._on_answer(params))
        elif method == "Page.javascriptDialogOpening":
            self._on_dialog(params)
        elif method == "Inspector.targetCrashed":
            self.crashed, self.loading = True, False
            self.devtools.session_gone(self.session)
        elif method == "Page.fileChooserOpened":
            self.note("The page asked for a file to upload; none was given.")
        elif method == "Page.frameNavigated" and not params.get("frame", {}).get("parentId"):
            self.navigations += 1
            self.url, self._context = str(params["frame"].get("url", ""))[:4_000], None
        elif params.get("frameId") == self.target:
            self._on_main_frame(method, params)

    def _on_main_frame(self, method: str, params: dict[str, Any]) -> None:
        if method in ("Page.frameStartedLoading", "Page.frameRequestedNavigation"):
            self.loading = True
        elif method == "Page.frameStoppedLoading":
            self.loading = False
        elif method == "Page.navigatedWithinDocument":
            self.url = str(params.get("url", ""))[:4_000]

    def _on_dialog(self, params: dict[str, Any]) -> None:
        self.dialogs += 1
        kind, text = str(params.get("type")), " ".join(str(params.get("message", "")).split())[:300]
        accept = kind in ("alert", "beforeunload")
        if kind != "beforeunload":
            self.note(
                f"The page showed a dialog ({kind}): {text!r}. It was {'closed' if accept else 'answered with Cancel'}."
            )
        if self.dialogs > MAX_DIALOGS:
            self.note(f"The page showed more than {MAX_DIALOGS} dialogs one after another{CLOSED}")
            self.spawn(self.crash())
        else:
            self.spawn(self._answer_dialog(accept=accept))

    async def _answer_dialog(self, *, accept: bool) -> None:
        with suppress(CommandFailed, Unresponsive, Gone):
            await self.ask("Page.handleJavaScriptDialog", {"accept": accept})

    async def crash(self) -> None:
        """End the page's process, whatever it is doing."""
        with suppress(CommandFailed, Unresponsive, Gone):
            await self.ask("Page.crash", timeout_s=3)

    async def _on_answer(self, params: dict[str, Any]) -> None:
        """The answer to a request for a document, before the browser takes it."""
        go_on: dict[str, Any] = {"requestId": params["requestId"]}
        status = params.get("responseStatusCode")
        method = "Fetch.continueRequest"
        if params.get("frameId") == self.target and status is not None:
            headers = {item["name"].lower(): item["value"] for item in params.get("responseHeaders", [])}
            self.answer = Answer(str(params["request"]["url"])[:4_000], int(status), headers)
            if self.attach_disposition and 200 <= int(status) < 300:
                kept = [item for item in params["responseHeaders"] if item["name"].lower() != "content-disposition"]
                named = headers.get("content-disposition", "")
                named = named if named.lower().startswith("attachment") else "attachment"
                kept.append({"name": "Content-Disposition", "value": named})
                method = "Fetch.continueResponse"
                go_on |= {"responseCode": int(status), "responseHeaders": kept}
        with suppress(CommandFailed, Unresponsive, Gone):
            await self.ask(method, go_on)
