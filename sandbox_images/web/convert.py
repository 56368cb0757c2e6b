"""A process of its own that turns bodies into text, one after another: hostile HTML and PDF can cost it its life, not the server's.

Started by `converter.py` as `python3 -I [-S] convert.py`. A job on stdin is a line of JSON (`bytes`, `content_type`,
`charset`, `url`, `format`) and then that many bytes; its answer on stdout is a line with a length and then that much
JSON: `{"kind": "html"/"pdf"/"text"/"binary", "title", "text", "encoding", ...}` or `{"error"}`.
"""

import json
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY_BYTES = 448 << 20  # of address space; below what the image gets
MAX_HTML_CHARS = 2 << 20  # of densely marked up HTML, which takes a few seconds a million
_HTML = ("text/html", "application/xhtml+xml")
_VAGUE = ("", "application/octet-stream", "binary/octet-stream", "application/x-download", "unknown/unknown")
_TEXT = (
    "application/json", "application/javascript", "application/ecmascript", "application/xml", "application/x-yaml", "application/yaml",
    "application/toml", "application/sql", "application/x-sh", "application/x-httpd-php", "application/x-ndjson", "application/x-tex",
    "application/rtf", "application/x-www-form-urlencoded", "application/graphql", "message/rfc822",
)  # fmt: skip
_SAMPLE_BYTES = 8_192
_ODD_SHARE = 0.05


def convert(job: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Chooses by what the body is, then by what the server calls it: servers err."""
    from sandbox_images.web import charset  # noqa: PLC0415 - see main

    kind = _kind(job["content_type"], job["charset"], body)
    if kind == "binary":
        return {"kind": kind}
    if kind == "pdf":
        return {"kind": kind} if job["format"] == "raw" else {"kind": kind, **_pdf(body)}
    text, encoding = charset.decode(body, job["charset"])
    if kind == "text" or job["format"] == "raw":
        return {"kind": kind, "title": "", "text": text, "encoding": encoding}
    from sandbox_images.web import page  # noqa: PLC0415 - a slow import that only pages need

    read = page.convert(text[:MAX_HTML_CHARS], job["url"], job["format"])
    return {"kind": kind, "encoding": encoding, "shortened": len(text) > MAX_HTML_CHARS, **read}


def _kind(content_type: str, header_charset: str | None, body: bytes) -> str:
    if body.startswith(b"%PDF-"):
        return "pdf"
    if content_type == "application/pdf":
        return "binary"  # what calls itself a PDF and is none
    wide = body.startswith((b"\xff\xfe", b"\xfe\xff")) or (header_charset or "").lower().startswith(
        ("utf-16", "utf-32")
    )
    if not wide and _looks_binary(body[:_SAMPLE_BYTES]):
        return "binary"
    if content_type in _HTML:
        return "html"
    if content_type in _VAGUE:
        return "html" if _looks_like_html(body[:_SAMPLE_BYTES]) else "text"
    if content_type.startswith("text/") or content_type.endswith(("+json", "+xml", "+yaml")) or content_type in _TEXT:
        return "text"
    return "binary"


def _looks_binary(sample: bytes) -> bool:
    odd = sum(byte < 32 and byte not in b"\t\n\r\f\x1b\b" for byte in sample)
    return b"\0" in sample or odd > _ODD_SHARE * len(sample)


def _looks_like_html(sample: bytes) -> bool:
    start = sample.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")) or b"<html" in start[:1_024]


def _pdf(body: bytes) -> dict[str, Any]:
    from sandbox_images.web import pdf  # noqa: PLC0415 - a slow import that only PDFs need

    try:
        return pdf.convert(body)
    except pdf.UnreadablePdf as problem:
        return {"error": str(problem)}


def _answer(job: dict[str, Any], body: bytes) -> dict[str, Any]:
    try:
        return convert(job, body)
    except MemoryError:
        return {"error": "it is too large or too complex to be converted", "fatal": True}
    except Exception as problem:  # the outermost boundary of this process
        return {"error": f"it could not be converted ({type(problem).__name__}: {str(problem)[:200]})"}


def main() -> None:
    """Ends with its stdin, or after a job that used up its memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from sandbox_images.base import third_party  # noqa: PLC0415 - the path comes first

    third_party.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(OSError):  # /proc may be closed
        Path("/proc/self/oom_score_adj").write_text("1000")  # before the server, if one has to go
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to the log
    while line := sys.stdin.buffer.readline():
        job = json.loads(line)
        answer = _answer(job, sys.stdin.buffer.read(job["bytes"]))
        data = json.dumps(answer).encode()
        answers.write(b"%d\n%b" % (len(data), data))
        answers.flush()
        if answer.get("fatal"):
            return


if __name__ == "__main__":
    main()
