"""Why the proxy does not forward.

    Refused         the policy or a limit says no: 403 with the rule, and a notice to the server
    Unanswered      the other side could not be had: 502 or 504 with a kind
    BadRequest      what the client sent is no request that a proxy forwards: 400, or the status it names
    ConnectionCut             the connection ends without an answer

Texts are sentences for whoever wrote the program in the sandbox. None holds an address or a name of the proxy's machine.
"""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - named as it reads where it is raised
    """`rule` is one of docs/reference/egress.md; `host` and `port` are what was asked for."""

    def __init__(self, rule: str, host: str, port: int, reason: str) -> None:
        super().__init__(reason)
        self.rule, self.host, self.port, self.reason = rule, host, port, reason


class Unanswered(Exception):  # noqa: N818 - named as it reads where it is raised
    """`kind`: no_address, connect, timeout, tls, reply or limit."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text

    @property
    def status(self) -> int:
        return {"timeout": 504, "limit": 503}.get(self.kind, 502)


class BadRequest(Exception):  # noqa: N818 - named as it reads where it is raised
    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.text, self.status = text, status


class ConnectionCut(Exception):  # noqa: N818 - named as it reads where it is raised
    """Nothing can be said any more: the connection is ended."""
