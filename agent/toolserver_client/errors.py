"""What can go wrong between the agent and a ToolServer. Errors of the HTTP library end here.

ClientProblem
├─ ToolServerAnswer    the ToolServer answered, and it was no: status, code, the body's detail
└─ NoAnswer            no usable answer came; `may_have_arrived` says whether the request may have taken effect
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class ClientProblem(Exception):  # noqa: N818 - both kinds read as what they are
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ToolServerAnswer(ClientProblem):
    """An answer that is not 2xx, in the contract's error shape.

    `detail` is the body's detail with at least `code` and `message`. `retry_after_s` is the longer of the header and the
    field of that name, None when neither was given.
    """

    def __init__(self, status: int, code: str, detail: dict[str, Any], retry_after_s: float | None = None) -> None:
        super().__init__(str(detail.get("message") or f"status {status}"))
        self.status, self.code, self.detail, self.retry_after_s = status, code, detail, retry_after_s

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"


class NoAnswerKind(StrEnum):
    REFUSED = "connection_refused"
    DNS = "name_not_found"
    CONNECT_TIMEOUT = "connect_timeout"
    CONNECT_FAILED = "connect_failed"  # network unreachable, TLS, ...
    LOST = "connection_lost"  # after the request, or part of it, was sent
    TIMEOUT = "answer_timeout"
    BAD_ANSWER = "bad_answer"  # no JSON, another shape, too long, cut, a proxy's error page


NEVER_SENT = frozenset(
    {NoAnswerKind.REFUSED, NoAnswerKind.DNS, NoAnswerKind.CONNECT_TIMEOUT, NoAnswerKind.CONNECT_FAILED}
)


class NoAnswer(ClientProblem):
    """`status` is that of an answer that could not be used, None when there was none at all."""

    def __init__(self, kind: NoAnswerKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status

    @property
    def may_have_arrived(self) -> bool:
        return self.kind not in NEVER_SENT
