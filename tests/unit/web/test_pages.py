"""What becomes of the pages that are fetched."""

from __future__ import annotations

import json

import pytest

from tests.unit.web.pdf_file import pdf
from tests.unit.web.site import Reply, Site
from tests.unit.web.worker_process import Worker

FILLER = "<p>" + "Some words of the article. " * 20 + "</p>"
ARTICLE = f"""<!doctype html><html><head><title> A  page\n of tests </title><base href="/deep/er/"></head><body>
<nav><a href="/home">Home</a></nav><script>alert("no")</script><style>p {{}}</style>
<main><h1>Head * line_up</h1><p>A <a href="next.html?a=1&amp;b=2#c">relative</a>, an <a href="https://example.org/x">absolute</a>,
a <a href="javascript:alert(1)">scripted</a> one and <b>bold</b>.</p>
<ul><li>one</li><li>two<ul><li>inner</li></ul></li></ul><pre><code>x = 1
  y &lt; 2</code></pre><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>
<img src="pic.png" alt="a picture"><img src="data:image/png;base64,AAAA" alt="inline">{FILLER}</main>
<footer>Imprint</footer></body></html>"""


def html(text: str) -> bytes:
    return f"<html><body><p>{text}</p></body></html>".encode()


def test_a_page_becomes_markdown_with_title_links_and_main_content(worker: Worker, site: Site) -> None:
    site.pages["/article"] = Reply(ARTICLE.encode(), "text/html; charset=utf-8")
    ending = worker.fetch(site.url("/article"))
    text = ending.text
    assert ending.structured["title"] == "A page of tests"
    assert ending.structured["status"] == 200
    assert ending.structured["content_type"] == "text/html"
    assert ending.structured["final_url"] == site.url("/article")
    assert ending.structured["bytes"] == len(ARTICLE.encode())
    assert "A page of tests" in ending.texts[0]
    assert "# Head * line_up" in text
    assert f"[relative](http://127.0.0.1:{site.port}/deep/er/next.html?a=1&b=2#c)" in text
    assert "[absolute](https://example.org/x)" in text
    assert "scripted" in text
    assert "javascript:" not in text
    assert "**bold**" in text
    assert "```\nx = 1\n  y < 2\n```" in text
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in text
    assert f"![a picture](http://127.0.0.1:{site.port}/deep/er/pic.png)" in text
    assert "base64" not in text
    for around in ("Home", "alert", "Imprint"):
        assert around not in text


def test_the_text_format_has_no_markup(worker: Worker, site: Site) -> None:
    site.pages["/article"] = Reply(ARTICLE.encode())
    text = worker.fetch(site.url("/article"), format="text").text
    assert "Head * line_up" in text
    assert "A relative, an absolute" in text
    assert "1 2" in text
    for mark in ("#", "](", "**", "<"):
        assert mark not in text.replace("y < 2", "")


def test_the_raw_format_is_the_source(worker: Worker, site: Site) -> None:
    site.pages["/article"] = Reply(ARTICLE.encode())
    assert worker.fetch(site.url("/article"), format="raw", max_chars=200_000).text == ARTICLE


def test_a_page_that_is_all_navigation_is_not_emptied(worker: Worker, site: Site) -> None:
    site.pages["/nav"] = Reply(b"<html><body><nav><a href='/a'>First</a> <a href='/b'>Second</a></nav></body></html>")
    assert "[First]" in worker.fetch(site.url("/nav")).text


def test_deep_nesting_still_gives_the_text(worker: Worker, site: Site) -> None:
    site.pages["/deep"] = Reply(b"<html><body>" + b"<div>" * 5_000 + b"bottom" + b"</div>" * 5_000)
    assert "bottom" in worker.fetch(site.url("/deep")).text


@pytest.mark.parametrize(
    ("label", "data", "content_type", "expected"),
    [
        ("meta", "<meta charset=iso-8859-1><p>Grüße, naïve</p>".encode("latin-1"), "text/html", "Grüße, naïve"),
        ("meta-http", '<meta http-equiv="Content-Type" content="text/html; charset=windows-1251"><p>Привет, мир</p>'.encode("cp1251"), "text/html", "Привет, мир"),
        ("header", "<p>Grüße</p>".encode("latin-1"), 'text/html; charset="ISO-8859-1"', "Grüße"),
        ("header-wins", "<meta charset=utf-8><p>„Größe“ – 5 €</p>".encode("cp1252"), "text/html; charset=windows-1252", "„Größe“ – 5 €"),
        ("latin1-is-1252", "<p>“quoted” – €</p>".encode("cp1252"), "text/html; charset=latin-1", "“quoted” – €"),
        ("shift-jis", "<meta charset=Shift_JIS><p>日本語のテキスト①</p>".encode("cp932"), "text/html", "日本語のテキスト①"),
        ("euc-jp", "<p>日本語のテキスト</p>".encode("euc_jp"), "text/html; charset=EUC-JP", "日本語のテキスト"),
        ("gb2312", "<p>中文网页内容</p>".encode("gb18030"), "text/html; charset=gb2312", "中文网页内容"),
        ("euc-kr", "<p>한국어 문서</p>".encode("cp949"), "text/html; charset=euc-kr", "한국어 문서"),
        ("bom-8", "\ufeff<p>Größe</p>".encode(), "text/html; charset=latin-1", "Größe"),
        ("bom-16", "<p>Größe</p>".encode("utf-16"), "text/html", "Größe"),
        ("bom-16-be", b"\xfe\xff" + "<p>Größe</p>".encode("utf-16-be"), "text/html", "Größe"),
        ("utf-16-header", "<html><p>Größe</p>".encode("utf-16-le"), "text/html; charset=utf-16le", "Größe"),
        ("xml", '<?xml version="1.0" encoding="ISO-8859-2"?><html><p>Łódź</p></html>'.encode("iso8859-2"), "application/xhtml+xml", "Łódź"),
        ("undeclared-utf8", "<p>Größe 日本</p>".encode(), "text/html", "Größe 日本"),
        ("undeclared-latin", "<p>Größe, Übermaß</p>".encode("latin-1"), "text/html", "Größe, Übermaß"),
        ("undeclared-sjis", "<p>これは日本語の文章です。</p>".encode("cp932"), "text/html", "これは日本語の文章です。"),
        ("undeclared-euc", "<p>これは日本語の文章です。</p>".encode("euc_jp"), "text/html", "これは日本語の文章です。"),
        ("undeclared-1251", "<p>Это обычный русский текст</p>".encode("cp1251"), "text/html", "Это обычный русский текст"),
        ("undeclared-koi8", "<p>Это обычный русский текст</p>".encode("koi8-r"), "text/html", "Это обычный русский текст"),
        ("undeclared-gb", "<p>这是一个中文网页的内容</p>".encode("gb18030"), "text/html", "这是一个中文网页的内容"),
        ("undeclared-korean", "<p>한국어로 된 문서입니다</p>".encode("cp949"), "text/html", "한국어로 된 문서입니다"),
        ("wrong-header", "<p>Größe</p>".encode("latin-1"), "text/html; charset=utf-8", "Gr\ufffd\ufffde"),
        ("unknown-label", "<p>Größe</p>".encode(), "text/html; charset=klingon", "Größe"),
        ("no-text-codec", "<p>Größe</p>".encode(), "text/html; charset=base64", "Größe"),
        ("undefined-byte", b"<p>a\x81b\x93c\x94</p>", "text/html; charset=windows-1252", "a\x81b“c”"),
        ("meta-in-comment-of-utf8", "<meta charset='utf-16'><p>Größe</p>".encode(), "text/html", "Größe"),
    ],
)  # fmt: skip
def test_text_is_exact_in_every_encoding(
    worker: Worker, site: Site, label: str, data: bytes, content_type: str, expected: str
) -> None:
    site.pages[f"/encoding/{label}"] = Reply(data, content_type)
    assert worker.fetch(site.url(f"/encoding/{label}")).text == expected


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/plain", "a < b * c_d\n\n\n\n   # no heading & <p>no tag</p>\ttab \n"),
        ("text/markdown; charset=utf-8", "# Title\n\n* a\n* b <br> ü\n"),
        ("application/json", json.dumps({"a": [1, 2, "<p>ü</p>"]}, ensure_ascii=False, indent=2)),
        ("application/ld+json", '{"@id": "x"}'),
        ("text/csv", "a;b\r\n1;2\r\n"),
        ("application/xml", "<?xml version='1.0'?><a><b>1</b></a>"),
        ("application/rss+xml", "<rss><channel/></rss>"),
        ("text/javascript", "if (a < b) { c() }"),
        (None, "plain words, no type"),
        ("application/octet-stream", "in truth a text\n"),
    ],
)
def test_text_that_is_no_html_comes_verbatim(worker: Worker, site: Site, content_type: str | None, body: str) -> None:
    site.pages["/verbatim"] = Reply(body.encode(), content_type)
    ending = worker.fetch(site.url("/verbatim"))
    assert ending.text == body
    assert ending.structured["kind"] == "text"


def test_html_without_a_content_type_is_recognised(worker: Worker, site: Site) -> None:
    site.pages["/untyped"] = Reply(b"\n<!DOCTYPE html><title>T</title><p>a <b>c</b></p>", None)
    assert worker.fetch(site.url("/untyped")).text == "a **c**"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("image/png", b"\x89PNG\r\n\x1a\n" + bytes(500)),
        ("application/zip", b"PK\x03\x04" + bytes(500)),
        ("text/html", b"\x7fELF" + bytes(500)),
        ("text/plain", bytes(range(256)) * 4),
        ("application/pdf", b"not a pdf at all"),
        ("video/mp4", b"x" * 500),
        (None, b"\x00\x01\x02" * 100),
    ],
)
def test_what_is_no_text_is_named_with_type_and_size(
    worker: Worker, site: Site, content_type: str | None, body: bytes
) -> None:
    site.pages["/binary"] = Reply(body, content_type)
    ending = worker.fetch(site.url("/binary"))
    assert ending.end == "done"
    assert ending.structured["kind"] == "binary"
    assert ending.structured["bytes"] == len(body)
    (only,) = ending.texts
    assert f"{len(body):,} bytes" in only
    assert (content_type or "unknown type") in only


def test_a_pdf_becomes_its_text_page_by_page(worker: Worker, site: Site) -> None:
    site.pages["/doc.pdf"] = Reply(pdf("First page", "Zweite Größe", title="A title"), "application/pdf")
    ending = worker.fetch(site.url("/doc.pdf"))
    assert ending.text == "[page 1 of 2]\n\nFirst page\n\n[page 2 of 2]\n\nZweite Größe"
    assert ending.structured["title"] == "A title"
    assert ending.structured["pages"] == 2


def test_a_pdf_is_recognised_whatever_it_is_called(worker: Worker, site: Site) -> None:
    for content_type in ("text/html", "application/octet-stream", None):
        site.pages["/doc"] = Reply(pdf("Called wrongly"), content_type)
        assert "Called wrongly" in worker.fetch(site.url("/doc")).text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"%PDF-1.7\n" + b"garbage " * 100, "broken"),
        (pdf("cut")[:200], "broken"),
        (pdf(""), "no text"),
        (b"%PDF-", "broken"),
    ],
)
def test_a_pdf_without_readable_text_is_a_clear_failure(worker: Worker, site: Site, body: bytes, said: str) -> None:
    site.pages["/bad.pdf"] = Reply(body, "application/pdf")
    ending = worker.fetch(site.url("/bad.pdf"))
    assert ending.end == "failed"
    assert said in ending.message


def test_a_raw_pdf_is_reported_not_printed(worker: Worker, site: Site) -> None:
    site.pages["/doc.pdf"] = Reply(pdf("x"), "application/pdf")
    ending = worker.fetch(site.url("/doc.pdf"), format="raw")
    assert ending.structured["kind"] == "pdf"
    assert len(ending.texts) == 1


@pytest.mark.parametrize(
    "status", ["400 Bad Request", "404 Not Found", "418 I'm a teapot", "500 Oops", "503 Busy", "451 "]
)
def test_an_error_status_is_a_failure_that_names_it(worker: Worker, site: Site, status: str) -> None:
    site.pages["/pretty"] = Reply(html("A very pretty error page. " * 500), status=status)
    ending = worker.fetch(site.url("/pretty"))
    assert ending.end == "failed"
    assert status.strip() in ending.message
    assert ending.structured["status"] == int(status[:3])
    assert "A very pretty error page." in ending.texts[-1]
    assert len(ending.texts[-1]) < 1_500


def test_an_empty_page_says_so(worker: Worker, site: Site) -> None:
    for reply in (
        Reply(b""),
        Reply(b"", status="204 No Content", content_type=None, length=None),
        Reply(b"<html></html>"),
    ):
        site.pages["/empty"] = reply
        ending = worker.fetch(site.url("/empty"))
        assert ending.end == "done"
        assert "The page has no text." in ending.texts[-1]


def test_long_pages_come_in_parts_that_fit_together(worker: Worker, site: Site) -> None:
    whole = "".join(f"line {number} äöü\n" for number in range(3_000))
    site.pages["/long"] = Reply(whole.encode(), "text/plain; charset=utf-8")
    parts, start, before = [], 0, len(site.seen)
    while start is not None:
        ending = worker.fetch(site.url("/long"), start=start, max_chars=10_000)
        parts.append(ending.text)
        start = ending.structured["next_start"]
        if start is not None:
            assert f"start={start}" in ending.texts[-1]
    assert "".join(parts) == whole
    assert len(site.seen) == before + 1  # later parts are those of the same download


def test_a_start_past_the_end_is_refused_with_the_length(worker: Worker, site: Site) -> None:
    site.pages["/short"] = Reply(b"abc", "text/plain")
    ending = worker.fetch(site.url("/short"), start=4)
    assert ending.end == "invalid"
    assert ending.outcome["errors"] == [{"pointer": "/start", "message": "is past the end: the text has 3 characters"}]


def test_the_text_obeys_the_bound_of_the_call(worker: Worker, site: Site) -> None:
    site.pages["/wide"] = Reply(("日本" * 20_000).encode(), "text/plain; charset=utf-8")
    ending = worker.call(
        "web_fetch", {"url": site.url("/wide"), "max_chars": 200_000}, call_id="b", deadline_s=30, max_text_bytes=4_096
    )
    assert sum(len(text.encode()) for text in ending.texts) <= 4_096
    assert ending.structured["next_start"] == len(ending.text)
