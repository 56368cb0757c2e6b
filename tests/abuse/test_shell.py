"""Hostile and awkward shell commands."""

from __future__ import annotations

import time

import pytest

from tests.abuse.arena import Arena, code_of


@pytest.mark.parametrize(
    "command",
    [
        "   ",
        "# only a comment",
        "echo 'unclosed",
        "cat <<EOF\nhere\nEOF",
        "cat <<EOF\nnever closed",
        ";;",
        "&",
        "\\",
        "\x07",
    ],
)
def test_odd_commands_end_at_once(arena: Arena, command: str) -> None:
    begun = time.monotonic()
    answer = arena.shell(command)
    assert answer.status_code in (200, 422, 500)
    assert code_of(answer) in ("", "tool_failed", "invalid_arguments")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    "command",
    ["cat", "python3", "read x", "less /etc/passwd", "vi -es +q! 2>&1", "head -c1", "ssh-keygen 2>&1", "bash -i"],
)
def test_commands_that_want_input_get_its_end(arena: Arena, command: str) -> None:
    answer = arena.shell(f"{command}; echo after-1", deadline_s=10)
    assert answer.status_code == 200 or code_of(answer) == "deadline_exceeded"
    assert code_of(answer) == "deadline_exceeded" or "after-1" in answer.text


def test_killing_parent_and_worker_does_no_harm(arena: Arena) -> None:
    answer = arena.shell("kill -9 1; kill -9 $PPID; echo tried")
    assert answer.status_code in (200, 500)


@pytest.mark.parametrize(
    ("command", "exit_code"),
    [
        ("exit 3", 3),
        ("false", 1),
        ("exit 137", 137),
        ("no-such-command", 127),
    ],
)
def test_an_exit_code_is_told_and_never_taken_for_a_timeout(arena: Arena, command: str, exit_code: int) -> None:
    answer = arena.shell(f"echo out-1; echo err-1 >&2; {command}")
    assert (answer.status_code, code_of(answer)) == (500, "tool_failed")
    detail = answer.json()["detail"]
    assert detail["exit_code"] == exit_code
    assert "out-1" in detail["structured"]["stdout"]
    assert "err-1" in detail["structured"]["stderr"]


@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_command_that_a_signal_ends_is_named_and_never_taken_for_a_timeout(arena: Arena, name: str) -> None:
    answer = arena.shell(f"echo out-1; kill -{name} $$; sleep 9", deadline_s=30)
    assert (answer.status_code, code_of(answer)) == (500, "tool_crashed")
    detail = answer.json()["detail"]
    assert detail["signal"] == f"SIG{name}"
    assert "out-1" in detail["structured"]["stdout"]


def test_exit_42_is_42_every_time(arena: Arena) -> None:
    assert {arena.shell("exit 42").json()["detail"]["exit_code"] for _ in range(40)} == {42}


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "sleep 601 | sleep 602",
        "setsid --wait sleep 603",
        "(sleep 604 &) ; sleep 605",
    ],
)
def test_a_command_past_its_deadline_is_gone_with_its_children(arena: Arena, command: str) -> None:
    begun = time.monotonic()
    answer = arena.shell("echo so-far; " + command, deadline_s=2)
    assert (answer.status_code, code_of(answer)) == (450, "deadline_exceeded"), answer.text
    assert "so-far" in answer.text
    assert time.monotonic() - begun < 10
    time.sleep(0.3)
    assert not [line for line in arena.processes() if "sleep" in line]


def test_a_quiet_command_is_left_alone_within_its_own_limit(arena: Arena) -> None:
    assert "ok-1" in arena.shell("sleep 6; echo ok-1", deadline_s=30).text


def test_git_opens_no_pager_and_no_editor(arena: Arena) -> None:
    if "git version" not in arena.shell("git --version").text:
        return  # the image has no git: nothing can hang
    begun = time.monotonic()
    arena.shell(
        "git init -q . && git config user.email a@b && git config user.name n && for i in $(seq 60); do git commit -q --allow-empty -m c$i; done",
        deadline_s=60,
    )
    assert arena.shell("git log").status_code == 200
    assert code_of(arena.shell("git commit --allow-empty", deadline_s=15)) in ("tool_failed", "")
    assert "ok-1" in arena.shell("echo ok-1").text
    assert time.monotonic() - begun < 60


def test_background_jobs_outlive_their_call_and_not_their_session(arena: Arena) -> None:
    started = arena.call("shell_execute", {"command": "echo begun-1; exec sleep 607", "background": True})
    assert started.status_code == 200, started.text
    assert arena.python("1").status_code == 200
    assert [line for line in arena.processes() if "607" in line]


def test_a_fork_bomb_in_the_shell_is_contained(arena: Arena) -> None:
    answer = arena.shell("f() { f | f & }; f; sleep 30", deadline_s=4)
    assert code_of(answer) in ("deadline_exceeded", "tool_crashed", "tool_failed"), answer.text
    until = time.monotonic() + 15
    while arena.shell("echo back-1").status_code != 200:
        assert time.monotonic() < until
