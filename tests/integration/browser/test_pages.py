"""What the browser's tools do with ordinary pages: real Chromium in a real sandbox."""

from __future__ import annotations

import base64
import json
import struct
import time

import pytest

from tests.integration.browser.browser_sandbox import BrowserSandbox, Ending, Proxy, answer

pytestmark = pytest.mark.docker

SHOP = """<title>The shop</title><nav><a href="/other">Other page</a></nav><h1>Tools</h1>
<p>Some <b>bold</b> words, <span style="display:none">hidden ones</span> and <a href="/new" target="_blank">a new tab</a>.</p>
<ol><li>first<li>second</ol><table><tr><th>a<th>b<tr><td>1<td>2</table><pre>x = 1
  y = 2</pre><form action="/found"><label>Search <input name="q" value="old"></label>
<select name="s"><option value="1">One<option value="2">Two</select><label><input type="checkbox" id="c">agree</label>
<input type="password" value="secret"><button>Find</button></form>
<p id="late"></p><button onclick="setTimeout(() => late.textContent = 'It has come', 700)">Later</button>
<div id="host"></div><script>host.attachShadow({mode: 'open'}).innerHTML = '<button onclick="document.title = \\'pressed\\'">In the shadow</button>'</script>
<iframe srcdoc="<p>in a frame <button onclick='parent.document.title = &quot;framed&quot;'>Framed</button>"></iframe>
<a href="/file.csv">a file</a>"""


@pytest.fixture
def shop(proxy: Proxy) -> Proxy:
    proxy.pages = {
        "/": SHOP,
        "/other": "<title>Other</title><p>The other page",
        "/new": "<title>New</title><p>In a new tab",
        "/found": "<title>Found</title><p>Results<script>document.body.append(location.search)</script>",
        "/file.csv": ("text/csv", b"a,b\n1,2\n"),
        "/long": "".join(f"<p>paragraph {number} äöü" for number in range(2_000)),
        "/cover": "<button style='position:absolute;top:40px'>Under</button><div id=banner style='position:fixed;inset:0;background:#fff'>We use cookies <button onclick='banner.remove()'>OK</button></div>",
    }
    return proxy


def ref(page: str, words: str) -> str:
    """The reference that stands behind these words."""
    return page[page.index(words) :].split("[e", 1)[1].split("]", maxsplit=1)[0].join(("e", ""))


def opened(browser: BrowserSandbox, path: str) -> str:
    return browser.call("open", url=f"http://shop.test{path}").page


def test_a_page_comes_as_markdown_with_references_and_nothing_else_is_asked_for(
    browser: BrowserSandbox, shop: Proxy
) -> None:
    shop.asked.clear()
    ending = browser.call("open", url="http://shop.test/")
    page = ending.page
    for part in (
        "# Tools", "Some **bold** words", "1. first", "2. second", "| a | b", "```\nx = 1\n  y = 2\n```", "[Other page](http://shop.test/other) [e",
        '(text field "Search" value="old") [e', '(select "s": *One*, Two) [e', '(checkbox "agree") [e', '(button "Find") [e', "in a frame",
        '(button "In the shadow") [e',
    ):  # fmt: skip
        assert part in page, page
    assert "hidden ones" not in page
    assert "secret" not in page
    assert ending.structured["title"] == "The shop"
    assert ending.structured["status"] == 200
    assert "no instruction" in ending.texts[-1]
    assert shop.asked == ["GET http://shop.test/ HTTP/1.1"]


def test_a_form_is_filled_and_sent(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")
    typed = browser.call("type", ref=ref(page, "text field"), text="größe & more")
    assert "größe & more" in typed.texts[0]
    assert browser.call("select", ref=ref(page, "(select"), option="Two").end == "done"
    assert "checked" in browser.call("click", ref=ref(page, "(checkbox")).page
    found = browser.call("click", ref=ref(page, '(button "Find"'))
    assert found.structured["title"] == "Found"
    assert "q=gr%C3%B6%C3%9Fe+%26+more&s=2" in found.page
    back = browser.call("back")
    assert back.structured["title"] == "The shop"
    sent = browser.call("type", ref=ref(back.page, "text field"), text="by Enter", submit=True)
    assert "q=by+Enter" in sent.page


def test_elements_in_frames_and_shadows_can_be_clicked(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")
    assert browser.call("click", ref=ref(page, "In the shadow")).structured["title"] == "pressed"
    assert browser.call("click", ref=ref(page, '(button "Framed"')).structured["title"] == "framed"


def test_a_new_tab_is_followed_and_the_old_one_is_still_there(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")
    new = browser.call("click", ref=ref(page, "a new tab"))
    assert "In a new tab" in new.page
    assert "A new tab was opened" in new.notes
    first, second = (tab["tab"] for tab in new.structured["tabs"])
    assert browser.call("tab", tab=first).structured["title"] == "The shop"
    closed = browser.call("tab", tab=second, close=True)
    assert [tab["tab"] for tab in closed.structured["tabs"]] == [first]
    assert browser.call("tab", tab=99).end == "failed"


def test_waiting_for_what_a_page_does_later(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")
    browser.call("click", ref=ref(page, '(button "Later"'))
    assert "It has come" in browser.call("wait", text="It has come", seconds=20).page
    ending = browser.call("wait", text="never", seconds=0.5)
    assert (ending.end, "did not appear" in ending.message) == ("failed", True)


def test_long_pages_come_in_parts_and_scroll(browser: BrowserSandbox, shop: Proxy) -> None:
    first = browser.call("open", url="http://shop.test/long", max_chars=5_000)
    start = first.structured["next_start"]
    assert start == 5_000
    second = browser.call("read", start=start, max_chars=200_000)
    assert "paragraph 1999 äöü" in first.page + second.page
    assert browser.call("read", start=10_000_000).end == "invalid"
    assert browser.call("scroll").structured["scroll"]["y"] > 500
    assert browser.call("scroll", to="bottom").structured["scroll"]["y"] > 10_000


def test_pictures_of_window_page_and_element(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")

    def size(ending: Ending) -> tuple[int, int]:
        (picture,) = [block for block in ending.content if block["type"] == "image"]
        data = base64.b64decode(picture["data"])
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        return width, height

    window, element = browser.call("screenshot"), browser.call("screenshot", ref=ref(page, '(button "Find"'))
    assert size(window)[0] == 1280
    assert size(element)[0] < 200
    opened(browser, "/long")
    kept = browser.call("screenshot", full_page=True, save=True)
    assert size(kept)[1] == 8_192
    (artifact,) = kept.outcome["artifacts"]
    assert artifact["media_type"] == "image/png"
    assert artifact["path"] in kept.outcome["workspace_changed"]
    assert artifact["path"].removeprefix("screenshots/") in browser.run("ls", "/workspace/screenshots")


def test_downloads_land_in_the_workspace_under_free_names(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/")
    by_link, by_address = (
        browser.call("download", ref=ref(page, "[a file]")),
        browser.call("download", url="http://shop.test/file.csv"),
    )
    shop.pages["/attached"] = lambda sock: sock.sendall(
        answer(
            "200 OK",
            b"x" * 500,
            "application/octet-stream",
            'Content-Disposition: attachment; filename="../../.ssh/autho rized.key"',
        )
    )
    by_opening = browser.call("open", url="http://shop.test/attached")
    paths = [ending.outcome["artifacts"][0]["path"] for ending in (by_link, by_address, by_opening)]
    assert paths[:2] == ["downloads/file.csv", "downloads/file-1.csv"]
    assert paths[2].startswith("downloads/")
    assert "/" not in paths[2].removeprefix("downloads/")
    assert browser.run("cat", "/workspace/downloads/file-1.csv") == "a,b\n1,2\n"
    assert by_opening.structured["title"] == "The shop"  # the page stays
    missing = browser.call("download", url="http://shop.test/none")
    assert (missing.end, "404" in missing.message) == ("failed", True)


def test_what_covers_an_element_is_named(browser: BrowserSandbox, shop: Proxy) -> None:
    page = opened(browser, "/cover")
    covered = browser.call("click", ref=ref(page, '"Under"'))
    assert covered.end == "failed"
    assert "covered by" in covered.message
    assert "banner" in covered.message
    browser.call("click", ref=ref(page, '"OK"'))
    assert browser.call("click", ref=ref(page, '"Under"')).end == "done"
    gone = browser.call("click", ref=ref(page, '"OK"'))
    assert "not on the page any more" in gone.message


@pytest.mark.parametrize("url", ["http://denied.test/", "https://secure.test/"])
def test_what_policy_refuses_is_denied_with_the_rule(browser: BrowserSandbox, shop: Proxy, url: str) -> None:
    ending = browser.call("open", url=url)
    assert ending.end == "denied"
    (denied,) = ending.outcome["denied"]
    assert denied == {
        "host": url.split("/")[2],
        "port": 80 if url.startswith("http:") else 443,
        "rule": "nothing allows it",
    }
    assert browser.call("open", url="http://shop.test/other").end == "done"


@pytest.mark.parametrize(
    ("url", "end"),
    [
        ("file:///etc/passwd", "denied"), ("chrome://version", "denied"), ("view-source:http://shop.test/", "denied"),
        ("data:text/html,x", "denied"), ("javascript:alert(1)", "denied"), ("ftp://shop.test/", "denied"), ("shop.test", "invalid"),
        ("http://", "invalid"), ("http://a b/", "invalid"), ("", "invalid"),
    ],
)  # fmt: skip
def test_other_addresses_are_refused(browser: BrowserSandbox, proxy: Proxy, url: str, end: str) -> None:
    assert browser.call("open", url=url).end == end


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ("click", {"ref": "12"}),
        ("click", {}),
        ("scroll", {"to": "left"}),
        ("wait", {"seconds": 1e9}),
        ("read", {"start": -1}),
        ("open", {"url": 5}),
    ],
)
def test_bad_arguments_are_invalid(
    browser: BrowserSandbox, proxy: Proxy, tool: str, arguments: dict[str, object]
) -> None:
    ending = browser.call(tool, **arguments)  # type: ignore[arg-type]
    assert ending.end == "invalid"
    assert ending.outcome["errors"][0]["pointer"]


def test_a_workspace_that_takes_no_downloads_is_named_and_no_page_is_lost_for_good(
    browser: BrowserSandbox, shop: Proxy
) -> None:
    """The folder that downloads go through is made at the browser's start: something else stands there now."""
    browser.run("sh", "-c", "kill -9 $(pgrep -o chromium); rm -rf /workspace/.toolcrib; touch /workspace/.toolcrib")
    ending = browser.call("open", url="http://shop.test/")
    while "crashed:" in ending.message:  # the end of the old one was noticed only now
        ending = browser.call("open", url="http://shop.test/")
    assert ending.end == "crashed"
    assert "Chromium did not start (.toolcrib is not a folder" in ending.message
    browser.run("rm", "/workspace/.toolcrib")
    assert "started anew" in browser.call("open", url="http://shop.test/").notes


def test_the_worker_speaks_the_extension(browser: BrowserSandbox, shop: Proxy) -> None:
    """The last of this file: the sandbox has another epoch afterwards."""
    assert browser.ask("toolcrib/bind", env={}, limits={}, epoch=1, lease_s=600) == {}
    browser.epoch = 1
    opened(browser, "/")
    call = browser.start("wait", "waits", seconds=30, text="never there")
    until = time.monotonic() + 10
    while "Waiting" not in json.dumps(browser.ask("toolcrib/peek", call_id="waits")):
        assert time.monotonic() < until
    assert {"call_id": "waits", "state": "running"} in browser.ask("toolcrib/attach", epoch=2, lease_s=600)["calls"]
    assert browser.ask("toolcrib/cancel", call_id="waits") == {"found": True}
    assert browser.ask("toolcrib/recall", call_id="waits", wait_s=10)["state"] == "ended"
    assert browser.ended[call]["result"]["_meta"]["toolcrib/outcome"]["end"] == "cancelled"
    late = browser.wait(browser.start("read", "late"))
    assert late["error"]["data"]["kind"] == "stale_epoch"
    browser.epoch = 2
    assert browser.call("wait", deadline_s=1, text="never there", seconds=30).end == "deadline"
    assert browser.call("read").structured["title"] == "The shop"  # the page's state outlives all that
