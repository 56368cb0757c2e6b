"""A web address, taken apart strictly: what is not plainly http or https with a host is refused before anything is resolved."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin, urlsplit

from sandbox_images.base.outcome import denied, invalid

MAX_URL_CHARS = 8_192
_PORTS = {"http": 80, "https": 443}
_KEPT = "%/:@!$&'()*+,;=~-._?[]"
_NUMBER_WITH_DOT = re.compile(r"(^|\.)(0x[0-9a-f]*|[0-9]+)\.$")
_BAD = re.compile(r"[\x00-\x20\x7f\\]")


@dataclass(frozen=True)
class WebAddress:
    """scheme: http or https. host: ASCII and lower case, an IPv6 address without brackets. target: path and query, escaped."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.target}"


def parse(text: str, pointer: str = "/url") -> WebAddress:
    """Raises Ended: `denied` for another scheme, `invalid` for what is no web address."""
    text = text.strip()
    if not text or len(text) > MAX_URL_CHARS:
        raise invalid(pointer, f"must be a web address of at most {MAX_URL_CHARS} characters")
    if _BAD.search(text):
        raise invalid(pointer, "holds a space, a backslash or a control character; escape it as %20, %5C, ...")
    scheme = text.partition(":")[0].lower() if ":" in text else ""
    if scheme not in _PORTS:
        if "://" in text or re.fullmatch(
            r"(data|javascript|file|ftp|gopher|about|blob|mailto|ws|wss|ldap|dict)", scheme
        ):
            raise denied(f"Only http and https addresses are fetched, not {scheme[:40]!r}.")
        raise invalid(pointer, "must be a whole web address that begins with http:// or https://")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError as problem:
        raise invalid(pointer, f"is no web address: {problem}") from problem
    if not host:
        raise invalid(pointer, "names no host")
    if parts.username is not None or parts.password is not None:
        raise invalid(pointer, "holds a user name or password before the host; leave it out")
    if port == 0:
        raise invalid(pointer, "names port 0")
    query = f"?{quote(parts.query, safe=_KEPT)}" if parts.query else ""
    target = (quote(parts.path, safe=_KEPT) or "/") + query
    return WebAddress(scheme, _ascii_host(host, pointer), port or _PORTS[scheme], target)


def follow(base: WebAddress, location: str) -> WebAddress:
    """Where a redirect of `base` leads. Raises Ended as `parse`."""
    try:
        joined = urljoin(str(base), location.strip())
    except ValueError as problem:
        raise invalid("/url", f"the redirect of {base} leads to no web address: {problem}") from problem
    return parse(_BAD.sub(lambda found: quote(found.group()), joined))


def _ascii_host(host: str, pointer: str) -> str:
    if not host.isascii():
        import idna  # noqa: PLC0415 - comes with httpx, and only such names need it

        try:
            host = idna.encode(host, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as problem:
            raise invalid(pointer, f"the host is no valid name: {problem}") from problem
    host = host.lower()
    if _NUMBER_WITH_DOT.search(host):  # an address, as browsers read it; a resolver would take it for a name
        host = host[:-1]
    if len(host) > 253 or not re.fullmatch(r"[a-z0-9._:-]+", host):
        raise invalid(pointer, "the host is no valid name or address")
    return host
