"""What a request asks for: a host and a port, read strictly. One spelling for each host, the one that rules have too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from sandbox_images.egress.problems import BadRequest, Refused

_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^#]*)(#.*)?", re.DOTALL)


@dataclass(frozen=True)
class Target:
    """host: lower case ASCII without a last dot, or an address in its usual form, IPv6 without brackets."""

    host: str
    port: int

    @property
    def shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def __str__(self) -> str:
        return f"{self.shown_host}:{self.port}"

    @property
    def is_address(self) -> bool:
        return ":" in self.host or self.host.replace(".", "").isdecimal()


def canonical_host(text: str) -> str:
    """Raises ValueError with the end of a sentence that begins with the host."""
    host = text.lower()
    if host.startswith("["):
        if not host.endswith("]"):
            raise ValueError("is no address")
        try:
            address = IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError("is no IPv6 address") from None
        if address.scope_id is not None:
            raise ValueError("names a zone")
        return str(address)
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not host.isascii() or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("is no valid host name (names that are not ASCII are written in their xn-- form)")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise ValueError("ends in a number and is no plain IPv4 address such as 192.0.2.7") from None
    return host


def read_authority(text: str, default_port: int | None) -> Target:
    """`host:port`; without a port `default_port`, where there is one. Raises Refused (rule `host`) and BadRequest."""
    if "@" in text:
        raise BadRequest("The address holds a user name before the host: leave it out.")
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
        if default_port is None:
            raise BadRequest("CONNECT names a host and a port, host:port.")
    elif not (_PORT.fullmatch(port) and int(port) < 65_536):
        raise BadRequest("The port is no number from 1 to 65535.")
    number = int(port) if port else default_port or 0
    if not host:
        raise BadRequest("The address names no host.")
    try:
        return Target(canonical_host(host), number)
    except ValueError as problem:
        shown = ascii(host[:80])[1:-1]
        raise Refused("host", shown, number, f"The host {shown} is refused: it {problem}.") from problem


def read_absolute(text: str) -> tuple[Target, str]:
    """The target of an absolute-form request and what to ask it for, path and query as they were written. Raises as above."""
    found = _ABSOLUTE.fullmatch(text)
    if found is None:
        raise BadRequest("This is an HTTP proxy: ask for a whole address, http://host/path, or CONNECT host:port.")
    scheme, authority, rest = found[1].lower(), found[2], found[3]
    if scheme == "https":
        raise BadRequest("For https addresses use CONNECT host:443 and speak TLS through the tunnel.")
    if scheme != "http":
        raise BadRequest("Only http addresses are forwarded; everything else goes through CONNECT.")
    path = rest if rest.startswith("/") else f"/{rest}"
    return read_authority(authority, 80), path
