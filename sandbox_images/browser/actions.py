"""What each tool does with the browser."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sandbox_images.base.egress_refusal import DENIED_HEADER, ERROR_HEADER, NO_WAY_OUT, ask_why, refusal
from sandbox_images.base.outcome import Ended, Outcome, denied, failed, invalid
from sandbox_images.base.progress import Progress
from sandbox_images.browser.addresses import host_and_port, openable
from sandbox_images.browser.browser import Browser
from sandbox_images.browser.devtools import CommandFailed, Unresponsive
from sandbox_images.browser.picture import take
from sandbox_images.browser.tab import NAVIGATION_TIMEOUT_S, Tab
from sandbox_images.browser.view import DEFAULT_CHARS, MAX_CHARS, View

LOAD_S, ACTION_S = 12.0, 10.0
ABORTED = "net::ERR_ABORTED"
BEGINS_S = 2.0  # how long a download may take to show
MAX_WAIT_S, DOWNLOAD_S = 60.0, 60.0
_NOT_READABLE = ("application/pdf", "image/", "video/", "audio/")
_PROBLEMS = {
    "gone": "is not on the page any more. Read the page again with browser_read.",
    "hidden": "is not visible, so it can't be used.",
    "disabled": "is disabled.",
    "no field": "takes no text. Use browser_click for it.",
    "no select": "is no list to select from. Use browser_click or browser_type for it.",
    "file": "is a field for a file: nothing can be uploaded.",
}


async def open_page(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    address = openable(arguments["url"])
    page = await browser.page()
    progress.note = f"Opening {address[:300]}"
    await _go(browser, page, address)
    return await _seen(browser, arguments)


async def click(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _page_to_use(browser)
    ref = arguments["ref"]
    progress.note = f"Clicking {ref}"
    point = _checked(ref, await page.script("point", ref))
    await _press_mouse(page, point["x"], point["y"], 2 if arguments.get("double") else 1)
    return await _acted(browser, page, arguments, f"Clicked {ref}.")


async def type_text(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _page_to_use(browser)
    ref, text = arguments["ref"], arguments["text"]
    progress.note = f"Typing into {ref}"
    made = _checked(ref, await page.script("focus", ref, arguments.get("clear", True), text))
    if not made.get("done") and text:
        await page.ask("Input.insertText", {"text": text})
    if arguments.get("submit"):
        await _press_enter(page)
        return await _acted(browser, page, arguments, f"Typed into {ref} and pressed Enter.")
    value = await page.script("value", ref)
    view = View(f"Typed into {ref}; it now holds {str(value)[:200]!r}.")
    _raise_denied(page)
    return view


async def select(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _page_to_use(browser)
    ref = arguments["ref"]
    progress.note = f"Selecting in {ref}"
    made = await page.script("select", ref, arguments["option"])
    if made.get("problem") == "no option":
        raise failed(
            f"{ref} has no option {arguments['option'][:100]!r}. It has: {', '.join(map(repr, made['options']))}."
        )
    _checked(ref, made)
    return await _acted(browser, page, arguments, f"Selected {made['chosen']!r} in {ref}.")


async def scroll(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _open_page(browser)
    progress.note = "Scrolling"
    made = await page.script("scroll", arguments.get("to", "down"), arguments.get("ref", ""))
    _checked(arguments.get("ref", ""), made)
    await page.settle(ACTION_S)
    where = f"The window shows {made['y']:,} to {made['y'] + made['view']:,} of {made['height']:,} pixels."
    return View(where, facts={"scroll": made})


async def read(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    await _open_page(browser)
    progress.note = "Reading the page"
    return await _seen(browser, arguments)


async def screenshot(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _open_page(browser)
    progress.note = "Taking a picture"
    box = None
    if arguments.get("ref"):
        box = _checked(arguments["ref"], await page.script("box", arguments["ref"]))
    return await take(browser, page, full=bool(arguments.get("full_page")), box=box, keep=bool(arguments.get("save")))


async def back(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _page_to_use(browser)
    progress.note = "Going back"
    history = await page.ask("Page.getNavigationHistory")
    index = int(history["currentIndex"])
    if index < 1 or history["entries"][index - 1]["url"] == "about:blank":
        raise failed("There is no page before this one in the tab.")
    await page.ask("Page.navigateToHistoryEntry", {"entryId": history["entries"][index - 1]["id"]})
    page.loading = True
    return await _acted(browser, page, arguments, "Went back.", limit_s=LOAD_S)


async def wait(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    page = await _open_page(browser)
    text, gone = arguments.get("text", ""), arguments.get("gone", False)
    limit = min(float(arguments.get("seconds", 10)), MAX_WAIT_S)
    progress.note = f"Waiting for {text[:100]!r}" if text else f"Waiting {limit:g} s"
    until = time.monotonic() + limit
    while time.monotonic() < until:
        if text and (await page.script("has", text)) is not gone:
            return await _seen(browser, arguments, f"{text[:200]!r} is {'gone' if gone else 'there'}.")
        await asyncio.sleep(min(0.3, max(0.0, until - time.monotonic())))
        page = await _open_page(browser)
    if text:
        raise failed(f"{text[:200]!r} {'was still there' if gone else 'did not appear'} after {limit:g} s.")
    return await _seen(browser, arguments, f"Waited {limit:g} s.")


async def download(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    ref, url = arguments.get("ref"), arguments.get("url")
    if bool(ref) == bool(url):
        raise invalid("", "either url or ref must be given, and not both")
    page = await (_open_page(browser) if ref else browser.page())
    progress.note = f"Downloading {ref or str(url)[:300]}"
    page.attach_disposition = True
    try:
        if ref:
            point = _checked(ref, await page.script("point", ref))
            if point["href"] and not point["download"]:
                await _go(browser, page, openable(point["href"]))
            else:
                await _press_mouse(page, point["x"], point["y"], 1)
                await page.settle(ACTION_S)
        else:
            await _go(browser, page, openable(str(url)))
        _raise_denied(page)
        await browser.downloads.wait(DOWNLOAD_S)
    finally:
        page.attach_disposition = False
    return View() if browser.downloads.any_news else _no_download(page)


async def tab(browser: Browser, arguments: dict[str, Any], progress: Progress) -> View:
    await _open_page(browser)
    progress.note = "Changing tabs"
    chosen = browser.show(int(arguments["tab"]))
    if not arguments.get("close"):
        return await _seen(browser, arguments)
    await browser.drop(chosen)
    return View(f"Closed tab {chosen.number}.")


# ---- parts of them


async def _open_page(browser: Browser) -> Tab:
    await browser.living()
    if browser.current is None and browser.lost is None:
        raise failed("No page is open. Use browser_open first.")
    page = await browser.page()
    if page.url == "about:blank" and page.answer is None and len(browser.tabs) == 1:
        why = f" The browser was started anew since {browser.lost}." if browser.lost else ""
        raise failed(f"No page is open.{why} Use browser_open first.")
    return page


async def _page_to_use(browser: Browser) -> Tab:
    """One whose scripts were stopped runs them again."""
    page = await _open_page(browser)
    await page.run_scripts(run=True)
    return page


async def _go(browser: Browser, page: Tab, address: str) -> None:
    begun = browser.downloads.begun
    try:
        problem = await page.navigate(address)
    except Unresponsive as late:
        await page.stop()
        raise failed(f"{address[:500]} did not answer within {NAVIGATION_TIMEOUT_S:.0f} s.") from late
    await page.settle(LOAD_S)
    if page.crashed:
        await browser.living()
    _raise_denied(page)
    if problem == ABORTED and page.answer is not None:  # a download, or an answer without content
        await browser.downloads.wait_for(begun + 1, BEGINS_S)
        await browser.downloads.wait(ACTION_S)
        return
    if problem is None:
        return
    raise await _not_opened(address, problem)


async def _not_opened(address: str, problem: str) -> Ended:
    if problem == "net::ERR_PROXY_CONNECTION_FAILED":
        return denied(NO_WAY_OUT)
    if problem == "net::ERR_TUNNEL_CONNECTION_FAILED":
        why = await ask_why(address)
        if isinstance(why, Ended):
            return why
        if why:
            return failed(f"{address[:500]} could not be opened. {why}")
    return failed(f"{address[:500]} could not be opened: {problem.removeprefix('net::')}.")


def _raise_denied(page: Tab) -> None:
    answer = page.answer
    if answer is None:
        return
    if DENIED_HEADER in answer.headers:
        host, port = host_and_port(answer.url)
        page.answer = None
        raise refusal(host, port, answer.headers[DENIED_HEADER])
    if ERROR_HEADER in answer.headers:
        page.answer = None
        raise failed(f"{answer.url[:500]} could not be had ({answer.headers[ERROR_HEADER]}).")


async def _acted(browser: Browser, page: Tab, arguments: dict[str, Any], said: str, limit_s: float = ACTION_S) -> View:
    await page.settle(limit_s)
    if browser.current is not None and browser.current is not page:  # it opened a tab of its own
        await browser.current.settle(LOAD_S)
    current = browser.current or page
    _raise_denied(current)
    if page.url.startswith("chrome-error:"):
        raise await _not_opened(page.answer.url if page.answer else "The page", "net::ERR_TUNNEL_CONNECTION_FAILED")
    return await _seen(browser, arguments, said)


async def _seen(browser: Browser, arguments: dict[str, Any], said: str = "") -> View:
    """The page that is shown now, as text. Raises Gone when it has crashed."""
    page = await browser.living() or await browser.page()
    _raise_denied(page)
    if page.url.partition(":")[0] not in ("http", "https", "about", "data", "blob"):
        address = page.url[:200]
        await browser.drop(page)
        raise denied(
            f"The page went to {address}, which is not opened here: only http and https are. Its tab was closed."
        )
    start, count = int(arguments.get("start", 0)), int(arguments.get("max_chars", DEFAULT_CHARS))
    found = await page.script("read")
    page.title = str(found["title"])
    view = View(said, str(found["text"]), bool(found["cut"]), start, min(count, MAX_CHARS))
    view.facts["scroll"] = {name: found[name] for name in ("y", "height", "view")}
    kind = page.answer.content_type if page.answer is not None else ""
    if kind.startswith(_NOT_READABLE):
        view.notes.append(f"This is {kind}, not a page with text. Use browser_download, or web_fetch for a PDF's text.")
    return view


def _checked(ref: str, made: Any) -> dict[str, Any]:
    if not isinstance(made, dict):
        raise failed(f"{ref} could not be found on the page.")
    problem = made.get("problem")
    if problem is None:
        return made
    if problem == "covered":
        raise failed(f"{ref} is covered by {made['by']}. Close that first, or scroll.")
    if problem == "value":
        raise failed(f"{ref} does not take that value; it now holds {made['takes']!r}.")
    raise failed(f"{ref} {_PROBLEMS.get(str(problem), f'takes no text: it is of kind {problem}.')}")


async def _press_mouse(page: Tab, x: float, y: float, times: int) -> None:
    about: dict[str, Any] = {"x": x, "y": y}
    await page.ask("Input.dispatchMouseEvent", {"type": "mouseMoved", **about})
    for count in range(1, times + 1):
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "button": "left", "clickCount": count, **about}
            try:
                await page.ask("Input.dispatchMouseEvent", event)
            except CommandFailed:
                return  # the page went on to another one at the press


async def _press_enter(page: Tab) -> None:
    key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "nativeVirtualKeyCode": 13}
    await page.ask("Input.dispatchKeyEvent", {"type": "keyDown", "text": "\r", **key})
    await page.ask("Input.dispatchKeyEvent", {"type": "keyUp", **key})


def _no_download(page: Tab) -> View:
    status = f" The server answered with the HTTP status {page.answer.status}." if page.answer is not None else ""
    raise Ended(Outcome("failed", f"Nothing was downloaded.{status} The page may need another click first."))
