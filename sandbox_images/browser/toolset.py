"""The browser's tools: arguments in, what the page shows out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandbox_images.base import arguments as argument_check
from sandbox_images.base.outcome import Outcome, failed
from sandbox_images.base.progress import Progress
from sandbox_images.browser import actions
from sandbox_images.browser.browser import Browser
from sandbox_images.browser.devtools import CommandFailed, Gone, Unresponsive
from sandbox_images.browser.tab import Stuck
from sandbox_images.browser.view import View, shown

Action = Callable[[Browser, dict[str, Any], Progress], Awaitable[View]]
ACTIONS: dict[str, Action] = {
    "browser_open": actions.open_page,
    "browser_click": actions.click,
    "browser_type": actions.type_text,
    "browser_select": actions.select,
    "browser_scroll": actions.scroll,
    "browser_read": actions.read,
    "browser_screenshot": actions.screenshot,
    "browser_back": actions.back,
    "browser_wait": actions.wait,
    "browser_download": actions.download,
    "browser_tab": actions.tab,
}


class Toolset:
    """Owns the browser. Call `close` at the end."""

    def __init__(self, root: str, tools: Path) -> None:
        self._browser = Browser(root)
        self._schemas = {tool["name"]: tool["inputSchema"] for tool in json.loads(tools.read_text("utf-8"))["tools"]}

    async def call(self, name: str, arguments: dict[str, Any], progress: Progress, max_text_bytes: int) -> Outcome:
        """Raises Ended. Cancelling leaves the browser as it is; a page that hangs is found by the next call."""
        problems = argument_check.problems(self._schemas[name], arguments)
        if problems:
            first = problems[0]
            said = f"The arguments are not right: {first['pointer']} {first['message']}."
            return Outcome("invalid", said, errors=problems)
        browser = self._browser
        browser.begin()
        try:
            view = await ACTIONS[name](browser, arguments, progress)
        except Stuck:
            tab = browser.current
            if tab is not None:
                await browser.drop(tab)
            raise failed(
                "The page does not answer: a script of it runs without end, or it is too large. Its tab was closed."
            ) from None
        except Gone:
            return browser.why_gone()
        except Unresponsive as late:
            where = browser.current.url if browser.current is not None else "the page"
            if browser.current is not None:
                await browser.drop(browser.current)
            raise failed(f"{where} did not answer in time ({late}). Its tab was closed.") from late
        except CommandFailed as problem:
            raise failed(f"The browser could not do it: {str(problem)[:300]}.") from problem
        if browser.lost is not None:
            why, browser.lost = browser.lost, None
            view.notes.insert(
                0, f"The browser was started anew since {why}: pages, cookies and logins from before are gone."
            )
        return shown(browser, view, max_text_bytes)

    async def close(self) -> None:
        await asyncio.shield(self._browser.close())
