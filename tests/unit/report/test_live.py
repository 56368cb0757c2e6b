from __future__ import annotations

import io

from rich.console import Console

from agent.report.artifacts import Manifest
from agent.report.live import Lines, Picture, progress
from agent.report.story import tell
from agent.report.terminal import print_run
from tests.unit.report.journal_example import full_run


def lines_of(goal: str) -> str:
    out = io.StringIO()
    log = Lines(Console(file=out, width=80))
    for event in full_run(goal):
        log.hear(event)
    return out.getvalue()


def test_without_a_terminal_each_event_is_one_line() -> None:
    lines = lines_of("Look at the data").splitlines()
    assert all(line.startswith("[") for line in lines)
    assert any("t2 judged fail: There is no chart" in line for line in lines)
    assert any("python_execute: failed (tool_failed): ValueError: no column 'rain'" in line for line in lines)
    assert any("Plan edited (modify t2)" in line for line in lines)


def test_what_an_earlier_process_did_is_not_printed_again() -> None:
    out = io.StringIO()
    log = Lines(Console(file=out, width=80))
    events = full_run()
    for event in events[:-1]:
        log.recall(event)
    log.hear(events[-1])
    (line,) = out.getvalue().splitlines()
    assert line.startswith(f"[{events[-1].at - events[0].at:7.1f} s] Run done")


def test_texts_cannot_steer_the_terminal_or_use_markup() -> None:
    text = lines_of("\x1b[2J [bold red]x[/] \x07")
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]x[/]" in text


def test_the_picture_shows_each_task_with_its_state_and_attempts() -> None:
    out = io.StringIO()
    picture = Picture(lambda: None)
    for event in full_run():
        picture.hear(event)
    Console(file=out, width=100).print(picture.render())
    text = out.getvalue()
    assert "✔ t1 Load the data" in text
    assert "✔ t2 Draw a chart of precipitation  attempt 2" in text
    assert "12 model calls · 3 tool calls" in text


def test_the_picture_names_what_goes_on_at_every_moment() -> None:
    picture = Picture(lambda: None)
    for event in full_run():
        picture.hear(event)
        Console(file=io.StringIO(), width=60).print(picture.render())


async def test_on_a_terminal_the_last_picture_stays() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    async with progress(console) as shown:
        for event in full_run():
            shown.hear(event)
    assert out.getvalue().rstrip().endswith("\x1b[?25h")
    assert "✔" in out.getvalue()


def test_show_prints_plan_steps_and_criticism() -> None:
    out = io.StringIO()
    print_run(Console(file=out, width=200), tell(full_run()), Manifest())
    text = out.getvalue()
    assert "a1 s1  python_execute failed" in text
    assert "critic: There is no chart" in text
    assert "It is **fine**." in text
