"""Servers that are slow, broken, huge or run in circles."""

from __future__ import annotations

import gzip
import time
import zlib
from collections.abc import Callable, Iterator

import pytest

from sandbox_images.web.inflate import PIECE_BYTES, CannotInflate, Inflater
from tests.unit.web.site import Reply, Site, drip, redirect
from tests.unit.web.worker_process import Worker

MIB = 1 << 20
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def bomb(mebibytes: int) -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        engine = zlib.compressobj(9, wbits=31)
        block = b"a" * MIB
        for _ in range(mebibytes):
            yield engine.compress(block)
        yield engine.flush()

    return pieces


@pytest.mark.parametrize("content_type", ["text/plain", "text/html", "application/pdf", None])
def test_a_decompression_bomb_is_refused_and_costs_no_memory(
    worker: Worker, site: Site, content_type: str | None
) -> None:
    site.pages["/small"] = Reply(b"<p>x</p>")
    worker.fetch(site.url("/small"))
    before = worker.rss_bytes()
    site.pages["/bomb"] = Reply(bomb(1024), content_type, headers={"Content-Encoding": "gzip"}, length=None)
    ending = worker.fetch(site.url("/bomb"))
    assert ending.end == "failed"
    assert "bomb" in ending.message
    assert worker.rss_bytes() - before < 16 * MIB


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(b"packed " * 3_000, mtime=0)),
        ("x-gzip", gzip.compress(b"packed " * 3_000, mtime=0)),
        ("deflate", zlib.compress(b"packed " * 3_000)),
        ("deflate", zlib.compress(b"packed " * 3_000)[2:-4]),
        ("gzip", gzip.compress(b"packed " * 1_000, mtime=0) + gzip.compress(b"packed " * 2_000, mtime=0)),
        ("gzip", gzip.compress(b"packed " * 3_000, mtime=0) + b"trailing junk"),
        ("identity", b"packed " * 3_000),
    ],
)
def test_usual_encodings_are_undone(worker: Worker, site: Site, encoding: str, data: bytes) -> None:
    site.pages["/packed"] = Reply(data, "text/plain", headers={"Content-Encoding": encoding})
    assert worker.fetch(site.url("/packed"), max_chars=200_000).text == "packed " * 3_000


@pytest.mark.parametrize(
    ("encoding", "data", "said"),
    [
        ("gzip", b"this is not gzip", "broken"),
        ("gzip", gzip.compress(bytes(range(256)) * 50, mtime=0)[:-20], "ends in the middle"),
        ("deflate", b"\xff\xff\xff\xff", "broken"),
        ("br", b"\x0b\x02\x80abc\x03", "not known"),
        ("gzip, gzip, gzip", b"x", "not known"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_a_clear_failure(
    worker: Worker, site: Site, encoding: str, data: bytes, said: str
) -> None:
    site.pages["/packed"] = Reply(data, "text/plain", headers={"Content-Encoding": encoding})
    ending = worker.fetch(site.url("/packed"))
    assert ending.end == "failed"
    assert said in ending.message


def test_pieces_are_bounded_whatever_comes_in() -> None:
    inflater = Inflater("gzip")
    data = gzip.compress(b"z" * (MIB - 1))
    sizes = [len(piece) for piece in inflater.feed(data)]
    assert sum(sizes) == MIB - 1
    assert max(sizes) <= PIECE_BYTES
    assert inflater.complete
    one_by_one = Inflater("gzip")
    assert b"".join(piece for byte in data for piece in one_by_one.feed(bytes([byte]))) == b"z" * (MIB - 1)
    with pytest.raises(CannotInflate, match="bomb"):
        list(Inflater("gzip").feed(gzip.compress(bytes(8 * MIB))))


@pytest.mark.parametrize("where", ["body", "headers", "status"])
def test_a_server_that_drips_is_stopped_at_the_deadline(worker: Worker, site: Site, where: str) -> None:
    firsts = {"body": HEAD + b"\r\n", "headers": HEAD + b"X-Slow: ", "status": b"HTTP/1.1 2"}
    site.pages["/drip"] = drip(firsts[where], b"0", 0.1, 150)
    begin = time.monotonic()
    ending = worker.call(
        "web_fetch", {"url": site.url("/drip")}, call_id=f"drip-{where}", deadline_s=1.5, max_text_bytes=65_536
    )
    assert ending.end == "deadline"
    assert "1.5 s" in ending.message
    assert 1.4 <= time.monotonic() - begin < 5


def test_other_calls_go_on_beside_a_slow_one(worker: Worker, site: Site) -> None:
    site.pages["/slow"] = drip(HEAD + b"\r\n", b"0", 0.1, 150)
    site.pages["/quick"] = Reply(b"quick", "text/plain")
    slow = [
        worker.start("web_fetch", {"url": site.url("/slow")}, call_id=f"slow-{n}", deadline_s=3, max_text_bytes=65_536)
        for n in range(5)
    ]
    begin = time.monotonic()
    assert worker.fetch(site.url("/quick")).text == "quick"
    assert time.monotonic() - begin < 2
    for request_id in slow:
        assert worker.wait(request_id)["result"]["_meta"]["toolcrib/outcome"]["end"] == "deadline"


def test_a_body_shorter_than_declared_is_a_failure_not_a_page(worker: Worker, site: Site) -> None:
    site.pages["/short"] = Reply(b"half of it", "text/plain", length=1_000)
    ending = worker.fetch(site.url("/short"))
    assert ending.end == "failed"
    assert "10 bytes" in ending.message


def test_a_chunked_body_cut_off_is_a_failure(worker: Worker, site: Site) -> None:
    site.pages["/chunks"] = lambda: [HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", b"5\r\nwo"]
    assert worker.fetch(site.url("/chunks")).end == "failed"
    site.pages["/chunks"] = lambda: [HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"]
    assert worker.fetch(site.url("/chunks")).text == "hello"


def test_a_body_longer_than_declared_ends_where_it_was_declared(worker: Worker, site: Site) -> None:
    site.pages["/more"] = Reply(b"four and more", "text/plain", length=4)
    assert worker.fetch(site.url("/more")).text == "four"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 300_000,
    ],
)
def test_what_is_no_http_is_a_clear_failure(worker: Worker, site: Site, raw: bytes) -> None:
    site.pages["/raw"] = lambda: [raw]
    ending = worker.fetch(site.url("/raw"))
    assert ending.end == "failed", ending
    assert "Traceback" not in ending.message


def test_a_huge_page_is_cut_and_says_so(worker: Worker, site: Site) -> None:
    def endless() -> Iterator[bytes]:
        for number in range(64 * 16):
            yield (b"%07d " % number) * 8_192

    site.pages["/huge"] = Reply(endless, "text/plain", length=None)
    before = worker.rss_bytes()
    ending = worker.fetch(site.url("/huge"), start=0, max_chars=100)
    assert ending.end == "done"
    assert ending.structured["cut"] is True
    assert ending.structured["total_chars"] == 4 * MIB
    assert "its end is missing" in ending.texts[-1]
    assert worker.rss_bytes() - before < 48 * MIB


def test_a_huge_pdf_is_refused(worker: Worker, site: Site) -> None:
    site.pages["/huge.pdf"] = Reply(
        lambda: (b"%PDF-1.7\n" if n == 0 else b"x" * MIB for n in range(24)), "application/pdf", length=None
    )
    ending = worker.fetch(site.url("/huge.pdf"))
    assert ending.end == "failed"


def test_honest_redirects_are_followed_and_the_final_address_shown(worker: Worker, site: Site) -> None:
    for hop in range(5):
        site.pages[f"/hop{hop}"] = redirect(
            f"/hop{hop + 1}", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"][hop]
        )
    site.pages["/hop5"] = Reply(b"arrived", "text/plain")
    ending = worker.fetch(site.url("/hop0"))
    assert ending.text == "arrived"
    assert ending.structured["url"] == site.url("/hop0")
    assert ending.structured["final_url"] == site.url("/hop5")
    assert ending.structured["redirects"] == [site.url(f"/hop{hop}") for hop in range(1, 5)]
    assert f"redirected from {site.url('/hop0')}" in ending.texts[0]


def test_loops_and_endless_redirects_are_stopped(worker: Worker, site: Site) -> None:
    site.pages["/a"], site.pages["/b"] = redirect("/b"), redirect("/a")
    begin = time.monotonic()
    ending = worker.fetch(site.url("/a"))
    assert ending.end == "failed"
    assert "loop" in ending.message
    for hop in range(50):
        site.pages[f"/on{hop}"] = redirect(f"/on{hop + 1}")
    before = len(site.seen)
    ending = worker.fetch(site.url("/on0"))
    assert ending.end == "failed"
    assert "more than 8 times" in ending.message
    assert len(site.seen) - before == 9
    assert time.monotonic() - begin < 15


def test_a_redirect_without_location_is_the_page_it_carries(worker: Worker, site: Site) -> None:
    site.pages["/odd"] = Reply(b"still here", "text/plain", status="302 Found")
    assert worker.fetch(site.url("/odd")).text == "still here"


def test_nothing_of_a_session_goes_to_the_server(worker: Worker, site: Site) -> None:
    site.pages["/cookie"] = Reply(b"x", "text/plain", headers={"Set-Cookie": "a=b; Path=/"})
    worker.fetch(site.url("/cookie"))
    worker.fetch(site.url("/cookie"))
    assert "cookie:" not in site.seen[-1].lower()
    assert "authorization:" not in site.seen[-1].lower()


def test_html_too_long_to_convert_is_shortened_and_says_so(worker: Worker, site: Site) -> None:
    site.pages["/book"] = Reply(b"<html><body><p>" + b"word " * (3 * MIB // 5) + b"</p>LAST</body></html>")
    ending = worker.fetch(site.url("/book"), max_chars=100)
    assert ending.structured["cut"] is True
    assert "its end is missing" in ending.texts[-1]
    assert "LAST" in worker.fetch(site.url("/book"), format="raw", start=3 * MIB - 100).text
