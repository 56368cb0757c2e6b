from __future__ import annotations

import base64
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agent.events import Event, EventKind
from agent.planning.task import TaskNode
from agent.report.artifacts import manifest
from agent.report.call_view import pretty
from agent.report.html import render
from agent.report.markdown import as_html
from agent.report.story import tell
from agent.tools.outcome import OutcomeKind
from tests.unit.report.journal_example import Script, full_run, outcome, png

HOSTILE = """<img src=x onerror=alert(1)><script>alert(2)</script></pre></style><b title="'">&lt;b&gt; a < b && c > d {{ 7*7 }}"""


class Page(HTMLParser):
    """What a browser would make of the page: tags with attributes, and the text of each element kind."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pre: list[str] = []
        self.text = ""
        self._in_pre = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self._in_pre = True
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_pre = self._in_pre and tag != "pre"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_pre:
            self.pre[-1] += data


def report_of(events: list[Event], workspace: Path) -> str:
    story = tell(events)
    return render(story, manifest(story, workspace), workspace)


def run_that_prints(text: str) -> list[Event]:
    script = Script()
    script.start("goal")
    script.add(EventKind.PLAN_GENERATED, tasks=[_task("t1")], reason="")
    script.attempt("t1", 1, "print(text)", outcome(text=text), "pass", "")
    return script.events


def _task(task_id: str, **more: object) -> dict[str, object]:
    return {**TaskNode(task_id, "a task").definition(), **more}


def test_output_with_markup_is_shown_as_text_and_makes_no_element(tmp_path: Path) -> None:
    page = Page(report_of(run_that_prints(HOSTILE), tmp_path))
    assert HOSTILE in page.pre
    assert not [tag for tag, _ in page.tags if tag in {"script", "iframe", "object", "link", "img"}]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


@pytest.mark.parametrize("text", ["a < b && c > d", "&lt;b&gt;", "'\"`", "{{ x }}{% y %}", "\u4f60\u597d \U0001f600"])
def test_output_appears_exactly_as_it_was_printed(text: str, tmp_path: Path) -> None:
    raw = report_of(run_that_prints(text), tmp_path)
    assert text in Page(raw).pre
    assert f'<pre class="raw">{html.escape(text)}</pre>'.replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in raw


def test_every_place_that_takes_foreign_text_escapes_it(tmp_path: Path) -> None:
    script = Script("r-2")
    script.start(HOSTILE)
    script.add(EventKind.NOTE, text=HOSTILE)
    script.add(
        EventKind.PLAN_GENERATED,
        tasks=[_task("t1", goal=HOSTILE, acceptance=[HOSTILE], artifacts=[HOSTILE])],
        reason=HOSTILE,
    )
    hostile = outcome(OutcomeKind.FAILED, HOSTILE, code=HOSTILE, workspace_changed=[HOSTILE])
    script.attempt("t1", 1, HOSTILE, hostile, "fail", HOSTILE)
    edit = {"op": "modify", "task_id": "t1", "changes": {"goal": HOSTILE}}
    script.add(EventKind.PLAN_EDITED, operations=[edit], reason=HOSTILE, after_task="t1", attempt=1, step=1)
    script.add(
        EventKind.LLM_REQUESTED, key="answer/summariser/r0", role=HOSTILE, model=HOSTILE, reserved={}, prompt_sha256=""
    )
    script.add(
        EventKind.LLM_FAILED,
        key="answer/summariser/r0",
        role=HOSTILE,
        model=HOSTILE,
        code="timeout",
        message=HOSTILE,
        ms=1.0,
    )
    script.add(EventKind.RUN_ENDED, state="failed", reason=HOSTILE, answer=HOSTILE, exit_code=1)
    (tmp_path / "<script>alert(1)<").write_text("x")
    page = Page(report_of(script.events, tmp_path))
    kinds = {tag for tag, _ in page.tags}
    assert not kinds & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert page.text.count("alert(2)") >= 12


def test_the_page_needs_nothing_from_outside_and_its_policy_forbids_it(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(png())
    raw = report_of(full_run(answer="[x](https://example.org/a) ![y](https://example.org/b.png)"), tmp_path)
    page = Page(raw)
    addresses = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in {"src", "href", "action", "data"}
    ]
    assert all(value and value.startswith(("#", "data:image/png;base64,")) for value in addresses)
    policy = next(
        attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes
    )
    style = re.search(r"<style>(.*?)</style>", raw, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    assert (
        policy == f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert not re.search(r"\sstyle=", raw)
    assert "url(" not in style.group(1)
    assert "@import" not in style.group(1)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(png())
    assert report_of(full_run(), tmp_path) == report_of(full_run(), tmp_path)


def test_it_tells_the_whole_story(tmp_path: Path) -> None:
    (tmp_path / "chart.png").write_bytes(png())
    (tmp_path / "data.csv").write_text("a,b\n")
    page = Page(report_of(full_run(answer="It is **fine**."), tmp_path))
    for expected in (
        "Draw a chart of precipitation", "Attempt 1", "Attempt 2", "ValueError: no column 'rain'", "There is no chart",
        "name the column", "look twice", "print totals", "I run it.", "draw(rows['precipitation'])", "50,000",
    ):  # fmt: skip
        assert expected in page.text, expected
    assert f"{len(full_run()):064x}" in page.text  # the journal's last hash
    assert ("strong", {}) in page.tags


def test_a_journal_that_stops_anywhere_still_makes_a_report(tmp_path: Path) -> None:
    events = full_run()
    for count in range(1, len(events) + 1):
        assert "</html>" in report_of(events[:count], tmp_path)


def test_control_characters_become_visible_signs(tmp_path: Path) -> None:
    page = Page(report_of(run_that_prints("\x1b]0;owned\x07 \x1b[31mred\x9b2J \u202eabc\x00"), tmp_path))
    shown = next(text for text in page.pre if "owned" in text)
    assert shown == "␛]0;owned␇ ␛[31mred\ufffd2J \ufffdabc␀"


def test_long_output_keeps_head_and_tail_and_says_what_is_missing(tmp_path: Path) -> None:
    page = Page(report_of(run_that_prints("start" + "x" * 100_000 + "end"), tmp_path))
    shown = next(text for text in page.pre if text.startswith("startx"))
    assert shown.endswith("xend")
    assert len(shown) < 25_000
    assert re.search(r"\[… [\d,]+ characters left out here …\]", shown)


def test_answers_are_markdown_without_raw_html_links_or_pictures() -> None:
    text = "# Title\n\n&lt;i&gt; <b>x</b> a < b\n\n[t](https://e.org) ![p](chart.png) [j](javascript:alert(1)) <https://e.org>\n\n|a|b|\n|-|-|\n|1|2|\n"
    page = Page(str(as_html(text)))
    assert {tag for tag, _ in page.tags} <= {"h1", "p", "em", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert "&lt;i&gt; <b>x</b> a < b" in page.text
    assert "t https://e.org p chart.png" in page.text


@pytest.mark.parametrize("depth", [400, 900, 5_000, 100_000])
def test_arguments_nested_as_deep_as_a_model_likes_are_shown(depth: int) -> None:
    for text in ("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        assert pretty(text).startswith(text[0])
