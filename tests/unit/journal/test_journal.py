from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolserver.errors import JournalUnavailable
from toolserver.journal import record
from toolserver.journal.digest import ArgumentsDigest
from toolserver.journal.journal import Journal, OpenCall
from toolserver.journal.read import Wanted, as_csv, as_json_lines, last_records, records
from toolserver.journal.record import Head
from toolserver.journal.segments import segments
from toolserver.journal.verify import verify
from toolserver.settings import JournalSettings

DAY_S = 86_400


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = opened(tmp_path)
    yield journal
    journal.close()


def opened(folder: Path, clock: Callable[[], float] = time.time, **over: object) -> Journal:
    journal = Journal(folder, JournalSettings.model_validate(over), clock)
    journal.open()
    return journal


def call(journal: Journal, name: str, *, ended: bool = True) -> None:
    who = {"tenant": "t", "key_id": "key_1", "session_id": "s", "call_id": name}
    journal.append("call_begun", **who, tool="echo")
    if ended:
        journal.append("call_ended", **who, tool="echo", status=200, code="ok")


def only_file(folder: Path) -> Path:
    (segment,) = segments(folder)
    return segment.path


def test_what_was_written_is_whole_and_read_back(journal: Journal) -> None:
    for number in range(5):
        call(journal, f"c{number}")
    verdict = verify(journal.folder)
    assert (verdict.problems, verdict.records, verdict.head) == ([], 10, journal.head)
    assert [one.seq for one in records(journal.folder, Wanted())] == list(range(1, 11))
    assert [one.seq for one in last_records(journal.folder, 3)] == [8, 9, 10]


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    for number in range(3):
        journal = opened(tmp_path)
        call(journal, f"c{number}", ended=number != 1)
        journal.close()
    journal = opened(tmp_path)
    assert list(journal.open_calls) == [OpenCall("t", "c1")]
    journal.close()
    assert verify(tmp_path).records == 5


def test_two_processes_append_in_turn(journal: Journal) -> None:
    other = Journal(journal.folder, JournalSettings())
    other.open(whole=False)
    for number in range(6):
        (journal if number % 2 else other).append("key_created", name=f"k{number}")
    other.close()
    assert verify(journal.folder).problems == []
    assert [one.fields["name"] for one in records(journal.folder, Wanted())] == [f"k{n}" for n in range(6)]


@pytest.mark.parametrize(
    "damage", ["changed", "removed", "moved", "added", "cut at the end", "cut at the start", "rehashed"]
)
def test_tampering_is_found_with_its_place(journal: Journal, damage: str) -> None:
    for number in range(5):
        call(journal, f"c{number}")
    path, head = only_file(journal.folder), journal.head
    lines = path.read_bytes().splitlines(keepends=True)
    where, kind = 5, "changed"
    if damage == "changed":
        lines[4] = lines[4].replace(b"c2", b"c9")
    elif damage == "removed":
        del lines[4]
        kind = "missing"
    elif damage == "moved":
        lines[4], lines[5] = lines[5], lines[4]
        kind = "missing"
    elif damage == "added":
        lines.insert(4, lines[4])
        where, kind = 6, "missing"
    elif damage == "cut at the end":
        del lines[8:]
        where, kind = 0, "cut"
    elif damage == "cut at the start":
        del lines[:4]
        where, kind = 0, "missing"
    else:  # one that knows how the hash is made still can't make the next line fit
        fields = json.loads(lines[4])
        before = Head(fields.pop("seq") - 1, fields.pop("prev"))
        fields.pop("hash")
        fields["tenant"] = "another"
        lines[4], _ = record.write(before, 0.0, fields.pop("event"), {n: v for n, v in fields.items() if n != "at"})
        where = 6
    path.write_bytes(b"".join(lines))
    problem = verify(journal.folder, [head]).problems[0]
    assert (problem.kind, problem.line) == (kind, where), problem


def test_a_changed_line_is_told_as_changed_alone(journal: Journal) -> None:
    for number in range(5):
        call(journal, f"c{number}")
    path = only_file(journal.folder)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2], lines[3] = lines[2].replace(b"c1", b"c9"), b"\xff\n"
    del lines[6:8]
    path.write_bytes(b"".join(lines))
    told = [(problem.kind, problem.line) for problem in verify(journal.folder).problems]
    assert told == [("changed", 3), ("changed", 4), ("missing", 7)]


def test_the_last_records_are_found_before_lines_that_are_none(journal: Journal) -> None:
    for number in range(5):
        call(journal, f"c{number}")
    with only_file(journal.folder).open("ab") as file:
        file.write(b"no record\n" * 5 + b'{"seq":11')
    assert [one.seq for one in last_records(journal.folder, 1)] == [10]
    assert [one.seq for one in last_records(journal.folder, 100)] == list(range(1, 11))


def test_a_journal_written_anew_does_not_fit_a_head_that_was_noted(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    call(journal, "true")
    noted = journal.head
    journal.close()
    only_file(tmp_path).unlink()
    forged = opened(tmp_path)
    call(forged, "forged")
    assert verify(tmp_path).problems == []
    assert [problem.kind for problem in verify(tmp_path, [noted]).problems] == ["unanchored"]
    forged.close()


def test_a_record_that_lacks_only_its_line_break_counts(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    call(journal, "c1")
    journal.close()
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    journal = opened(tmp_path)
    assert (journal.head.seq, not journal.open_calls) == (2, True)
    call(journal, "c2")
    journal.close()
    verdict = verify(tmp_path)
    assert (verdict.problems, verdict.notes, verdict.records) == ([], [], 4)


@pytest.mark.parametrize("left", [1, 40, -2])
def test_a_line_that_a_crash_cut_is_told_and_the_chain_goes_on(tmp_path: Path, left: int) -> None:
    journal = opened(tmp_path)
    call(journal, "before")
    call(journal, "cut", ended=False)
    journal.close()
    path = only_file(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    assert [problem.kind for problem in verify(tmp_path).problems] == ["cut"]
    journal = opened(tmp_path)
    call(journal, "after")
    journal.close()
    verdict = verify(tmp_path)
    assert verdict.problems == []
    assert "cut at a crash" in verdict.notes[0]
    assert [one.event for one in records(tmp_path, Wanted())][2] == "cut_line_closed"
    path.write_bytes(path.read_bytes().replace(lines[-1][:left] + b"\n", b"x" + lines[-1][1:left] + b"\n", 1))
    assert verify(tmp_path).problems


def test_a_changed_last_line_is_not_taken_for_one_that_a_crash_cut(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    call(journal, "c1")
    journal.close()
    path = only_file(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":500'))
    journal = opened(tmp_path)
    call(journal, "c2")
    journal.close()
    problems = verify(tmp_path).problems
    assert [(problem.kind, problem.line) for problem in problems] == [("changed", 2)]


def test_segments_chain_and_the_open_calls_are_found_over_them(tmp_path: Path) -> None:
    journal = opened(tmp_path, segment_mb=1)
    call(journal, "long", ended=False)
    while len(segments(tmp_path)) < 3:
        journal.append("call_ended", tenant="t", call_id="other", padding="x" * 100_000)
    journal.close()
    assert verify(tmp_path).problems == []
    again = opened(tmp_path)
    assert again.open_calls == {OpenCall("t", "long"): "key_1"}
    again.close()
    first, second, _ = segments(tmp_path)
    kept = second.path.read_bytes()
    second.path.unlink()
    assert verify(tmp_path).problems[0].kind == "missing"
    second.path.write_bytes(kept)
    first.path.unlink()
    assert "no record says that those before it were pruned" in verify(tmp_path).problems[0].message


def test_pruning_leaves_a_chain_that_can_be_checked(tmp_path: Path) -> None:
    now = 1_000_000_000.0
    journal = opened(tmp_path, lambda: now, segment_mb=1, keep_days=10)
    noted = []
    for _ in range(3):
        journal.append("x", padding="x" * 700_000)
        journal.append("x", padding="x" * 700_000)
        noted.append(journal.head)
        now += 4 * DAY_S
    now -= 3 * DAY_S
    assert journal.prune() == 0
    now += 8 * DAY_S
    assert journal.prune() == 2
    verdict = verify(tmp_path, noted)
    assert verdict.problems == []
    assert verdict.first == segments(tmp_path)[0].first > 1
    assert verify(tmp_path, [Head(verdict.first - 1, "0" * 64)]).problems[0].kind == "unanchored"
    journal.close()


def test_a_full_disk_refuses_what_is_new_keeps_what_ended_and_recovers(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(journal, "c1", ended=False)
    write, full = os.write, True

    def short(file: int, data: bytes) -> int:
        return write(file, data[:10]) if full else write(file, data)

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(JournalUnavailable, match="No space left"):
        call(journal, "c2")
    journal.append_surely("call_ended", tenant="t", call_id="c1", status=200)
    assert not journal.settle()
    with pytest.raises(JournalUnavailable):
        call(journal, "c3")
    full = False
    call(journal, "c4")
    assert [(one.event, one.fields["call_id"]) for one in records(journal.folder, Wanted())] == [
        ("call_begun", "c1"), ("call_ended", "c1"), ("call_begun", "c4"), ("call_ended", "c4"),
    ]  # fmt: skip
    assert verify(journal.folder).problems == []


def _append_until_killed(folder: Path) -> None:
    journal = opened(folder, segment_mb=1)
    number, until = 0, time.monotonic() + 60  # not for ever, should the test itself be killed
    while time.monotonic() < until:
        number += 1
        call(journal, f"{os.getpid()}-{number}")


def test_killed_writers_lose_no_record_and_break_no_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    heads = []
    for round_ in range(8):
        writers = [context.Process(target=_append_until_killed, args=(tmp_path,), daemon=True) for _ in range(2)]
        for writer in writers:
            writer.start()
        until = time.monotonic() + 30
        while (
            not tmp_path.is_dir() or not segments(tmp_path) or len(last_records(tmp_path, 1)) < 1
        ) and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(0.05 + 0.01 * round_)
        heads.append(last_records(tmp_path, 2)[0].head)
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
    opened(tmp_path).close()
    verdict = verify(tmp_path, heads)
    assert verdict.problems == []
    assert verdict.records > 100


def test_export_by_time_tenant_and_session(tmp_path: Path) -> None:
    now = 1_700_000_000.0
    journal = opened(tmp_path, lambda: now)
    for tenant, session in (("a", "s1"), ("b", "s2"), ("a", "s3")):
        journal.append("session_created", tenant=tenant, session_id=session, limits={"cpus": 1})
        now += DAY_S

    def found(**wanted: str) -> list[object]:
        return [one.fields["session_id"] for one in records(tmp_path, Wanted(**wanted))]

    assert found(tenant="a") == ["s1", "s3"]
    assert found(session_id="s2") == ["s2"]
    assert found(since="2023-11-15", until="2023-11-16") == ["s2"]
    assert json.loads(next(as_json_lines(records(tmp_path, Wanted()))))["seq"] == 1
    head, *rows = as_csv(records(tmp_path, Wanted()))
    assert head.startswith("seq,at,event,tenant")
    assert '""cpus"":1' in rows[0]
    journal.close()


def test_a_cell_is_no_formula(journal: Journal) -> None:
    journal.append("key_created", tenant="=1+1")
    assert ",'=1+1," in list(as_csv(records(journal.folder, Wanted())))[1]


def test_digests_of_arguments_need_the_key(tmp_path: Path) -> None:
    here, there = ArgumentsDigest(tmp_path / "a"), ArgumentsDigest(tmp_path / "b")
    assert here("yes") == ArgumentsDigest(tmp_path / "a")("yes") != here("no")
    assert here("yes") != there("yes")
    assert (tmp_path / "a" / "arguments.key").stat().st_mode & 0o777 == 0o600


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.integers(), st.text(max_size=20)), max_size=5))
def test_any_record_reads_back_as_written(fields: dict[str, object]) -> None:
    kept = {name: value for name, value in fields.items() if name not in {"seq", "at", "event", "prev", "hash"}}
    line, head = record.write(Head(), 0.0, "x", kept)
    found = record.read(line)
    assert found is not None
    assert found.head == head
    assert found.fields == {"at": "1970-01-01T00:00:00.000Z", "event": "x", **kept}
    assert line.count(b"\n") == 1


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_what_is_no_record_is_refused_calmly(line: bytes) -> None:
    assert record.read(line) is None
