"""The head of a request, checked byte by byte before h11 reads it: what two readers could understand in two ways is refused."""

from __future__ import annotations

import re

from sandbox_images.egress.problems import BadRequest

MAX_FIELDS = 128
END = b"\r\n\r\n"
_ODD_LINE_END = re.compile(rb"(?<!\r)\n|\r(?!\n)|\x00")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_VERSION = re.compile(rb" HTTP/1\.[01]$")


def check_head(head: bytes) -> None:
    """`head` ends with an empty line. Raises BadRequest. What is left, h11 judges."""
    if _ODD_LINE_END.search(head):
        raise BadRequest("The request's head has a line that does not end in CR LF, or a NUL.")
    lines = head[: -len(END)].split(b"\r\n")
    if not _VERSION.search(lines[0]):
        raise BadRequest("The request is not HTTP/1.1 or HTTP/1.0.", 505 if b" HTTP/" in lines[0] else 400)
    if len(lines) - 1 > MAX_FIELDS:
        raise BadRequest(f"The request has more than {MAX_FIELDS} header fields.", 431)
    lengths, codings = [], []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise BadRequest("The request has a header field that can't be read, or one folded over two lines.")
        if name.lower() == b"content-length":
            lengths.append(value.strip(b" \t"))
        elif name.lower() == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise BadRequest("The request says in more than one way how long its body is.")
    if lengths and not _LENGTH.fullmatch(lengths[0]):
        raise BadRequest("The request's Content-Length is no number of bytes.")
    if codings and (codings[0] != b"chunked" or lines[0].endswith(b"1.0")):
        raise BadRequest("The only transfer coding is chunked, in HTTP/1.1.", 501 if codings[0] != b"chunked" else 400)
