"""What a sandbox may reach: nothing, a list of hosts and ports, or every public address. Pure: the egress proxy enforces it.

A rule is kept in one canonical form, `host:port`, whatever it was written as:

    example.org            both example.org:80 and example.org:443
    example.org:8443       that port alone
    example.org:*          every port
    *.example.org:443      every name below example.org, not example.org itself
    192.0.2.7:443, [2001:db8::7]:443
    bücher.example         xn--bcher-kva.example, ports 80 and 443

A rule never makes an address public: what resolves to a private one is refused all the same, unless the operator named it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Literal, cast, get_args

import idna

Mode = Literal["none", "allow", "open"]
MAX_RULES = 256
MAX_RULE_CHARS = 300
USUAL_PORTS = (80, 443)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_FORMS = "write host:port, host, *.host:port, host:* or [IPv6 address]:port"


@dataclass(frozen=True)
class EgressPolicy:
    """mode: `none`, `allow` (only what a rule names) or `open` (every public address). allow: rules, only for `allow`.

    Rules come out canonical, sorted, each once. Raises ValueError with a sentence for whoever wrote it.
    """

    mode: Mode = "none"
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"The egress mode {str(self.mode)[:40]!r} is unknown: it is none, allow or open.")
        if self.allow and self.mode != "allow":
            raise ValueError(f'An egress list of what to allow goes with the mode "allow", not with "{self.mode}".')
        rules = {rule for text in self.allow for rule in _rules(text)}
        object.__setattr__(self, "allow", tuple(sorted(rules)))

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> EgressPolicy:
        """From `{"mode"?, "allow"?}`; without a mode it is `allow` where there is a list, else `none`. Raises ValueError."""
        unknown = set(told) - {"mode", "allow"}
        if unknown:
            raise ValueError(f"An egress policy has mode and allow, not {str(min(unknown, key=str))[:40]!r}.")
        allow = told.get("allow")
        if allow is None:
            allow = ()
        if not isinstance(allow, list | tuple) or not all(isinstance(rule, str) for rule in allow):
            raise ValueError(f"The egress list of what to allow is a list of texts: {_FORMS}.")
        if len(allow) > MAX_RULES:
            raise ValueError(f"An egress policy holds at most {MAX_RULES} rules, not {len(allow)}.")
        mode = told.get("mode")
        if mode is None:
            mode = "allow" if "allow" in told else "none"
        return cls(cast("Mode", mode), tuple(allow))

    def as_json(self) -> dict[str, Any]:
        """`{"mode", "allow"}`, as `load` takes it and the HTTP contract shows it; `allow` only with that mode."""
        return {"mode": self.mode, "allow": list(self.allow)} if self.mode == "allow" else {"mode": self.mode}

    @property
    def reaches_out(self) -> bool:
        """Whether anything at all is allowed: an empty list allows nothing."""
        return self.mode == "open" or bool(self.allow)


def narrowed(session: EgressPolicy, image: EgressPolicy) -> EgressPolicy:
    """What both allow: never more than either."""
    if session.mode == "none" or image.mode == "none":
        return EgressPolicy()
    if session.mode == "open":
        return image
    if image.mode == "open":
        return session
    both = {rule for one in session.allow for other in image.allow if (rule := _common(one, other)) is not None}
    return EgressPolicy("allow", tuple(both))


def canonical_host(text: str) -> str:
    """A host as rules and the proxy know it: lower case ASCII without a last dot, an address in its usual form, IPv6 without
    brackets. Raises ValueError with a sentence: for what is no host, and for an address in a notation that readers differ on.
    """
    host = text
    if not host.isascii():
        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except UnicodeError as problem:
            raise ValueError(f"The host {text[:80]!r} is no valid name: {problem}.") from problem
    host = host.lower()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"The host {text[:80]!r} is no IPv6 address.")
    if ":" in host:
        return _ipv6(host, text)
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"The host {text[:80]!r} is no valid name or address.")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise ValueError(
                f"The host {text[:80]!r} ends in a number and is no plain IPv4 address: write it as 192.0.2.7."
            ) from None
    return host


def _ipv6(host: str, text: str) -> str:
    try:
        address = IPv6Address(host)
    except ValueError:
        raise ValueError(f"The host {text[:80]!r} is no IPv6 address.") from None
    if address.scope_id is not None:
        raise ValueError(f"The address {text[:80]!r} names a zone, which only this host knows: leave it out.")
    return str(address)


def _rules(text: str) -> list[str]:
    """The canonical rules that `text` stands for."""
    if len(text) > MAX_RULE_CHARS:
        raise ValueError(f"An egress rule has at most {MAX_RULE_CHARS} characters.")
    host, port = _parted(text)
    below = host.startswith("*.")
    try:
        name = canonical_host(host[2:] if below else host)
    except ValueError as problem:
        raise ValueError(f"The egress rule {text[:80]!r} can't be read: {problem}") from problem
    if below and (":" in name or name.replace(".", "").isdecimal()):
        raise ValueError(
            f"The egress rule {text[:80]!r} has a wildcard before an address: only names have names below them."
        )
    shown = ("*." if below else "") + (f"[{name}]" if ":" in name else name)
    if port is None:
        return [f"{shown}:{usual}" for usual in USUAL_PORTS]
    if port != "*" and not (_PORT.fullmatch(port) and int(port) < 65_536):
        raise ValueError(f"The egress rule {text[:80]!r} names no port from 1 to 65535: {_FORMS}.")
    return [f"{shown}:{port}"]


def _parted(text: str) -> tuple[str, str | None]:
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, ""
        colon = ""
    if not host or host == "*" or any(sign in host for sign in "/@?#"):
        hint = ' To allow every public host, use the mode "open".' if host == "*" else ""
        raise ValueError(f"The egress rule {text[:80]!r} names no host: {_FORMS}.{hint}")
    if ":" in host and not host.startswith("["):
        raise ValueError(
            f"The egress rule {text[:80]!r} can't be read: write an IPv6 address in brackets, [2001:db8::7]:443."
        )
    return host, port if colon else None


def _common(one: str, other: str) -> str | None:
    """The rule for what both canonical rules allow, or None."""
    host, port = one.rsplit(":", 1)
    other_host, other_port = other.rsplit(":", 1)
    if "*" not in (port, other_port) and port != other_port:
        return None
    if _covers(host, other_host):
        narrow = other_host
    elif _covers(other_host, host):
        narrow = host
    else:
        return None
    return f"{narrow}:{other_port if port == '*' else port}"


def _covers(wide: str, narrow: str) -> bool:
    return wide == narrow or (wide.startswith("*.") and narrow.endswith(wide[1:]))
