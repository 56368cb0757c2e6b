"""What the proxy itself answers. Each ends the connection but `ESTABLISHED`."""

from __future__ import annotations

from http import HTTPStatus

from sandbox_images.egress.problems import BadRequest, Refused, Unanswered

READY = b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


def answer(status: int, text: str, *fields: str, body: bool = True) -> bytes:
    """`body` False: for HEAD."""
    content = f"{text}\n".encode("utf-8", "replace")
    head = "\r\n".join(
        (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *fields,
            "Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(content)}", "Connection: close",
        )
    )  # fmt: skip
    return head.encode("ascii", "replace") + b"\r\n\r\n" + (content if body else b"")


def answer_to(problem: Refused | Unanswered | BadRequest, *, body: bool = True) -> bytes:
    if isinstance(problem, Refused):
        return answer(403, problem.reason, f"X-Toolcrib-Denied: {problem.rule}", body=body)
    if isinstance(problem, Unanswered):
        return answer(problem.status, problem.text, f"X-Toolcrib-Error: {problem.kind}", body=body)
    return answer(problem.status, problem.text, body=body)


def status_of(problem: Refused | Unanswered | BadRequest) -> int:
    return 403 if isinstance(problem, Refused) else problem.status


BUSY = answer(
    503, "More connections are open at a time than this session may have.", "X-Toolcrib-Error: limit", "Retry-After: 1"
)
