"""Which addresses are public. Written out as data: `ipaddress.is_global` of Python 3.11 is wrong for several of these.

Sources: the IANA special-purpose address registries, and the addresses where clouds serve their metadata.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_V4 = (
    ("169.254.169.254/32", "a cloud's metadata service"),
    ("169.254.170.2/32", "a cloud's metadata service"),
    ("100.100.100.200/32", "a cloud's metadata service"),
    ("192.0.0.192/32", "a cloud's metadata service"),
    ("168.63.129.16/32", "a cloud's metadata service"),
    ("0.0.0.0/8", "an unspecified address"),
    ("10.0.0.0/8", "a private address"),
    ("100.64.0.0/10", "a carrier's shared address"),
    ("127.0.0.0/8", "a loopback address"),
    ("169.254.0.0/16", "a link-local address"),
    ("172.16.0.0/12", "a private address"),
    ("192.0.0.0/24", "a reserved address"),
    ("192.0.2.0/24", "a documentation address"),
    ("192.88.99.0/24", "a reserved address"),
    ("192.168.0.0/16", "a private address"),
    ("198.18.0.0/15", "a benchmarking address"),
    ("198.51.100.0/24", "a documentation address"),
    ("203.0.113.0/24", "a documentation address"),
    ("224.0.0.0/4", "a multicast address"),
    ("240.0.0.0/4", "a reserved address"),
)
_V6 = (
    ("::/128", "an unspecified address"),
    ("::1/128", "a loopback address"),
    ("fd00:ec2::254/128", "a cloud's metadata service"),
    ("fd20:ce::254/128", "a cloud's metadata service"),
    ("64:ff9b:1::/48", "a translated local address"),
    ("100::/64", "a discard-only address"),
    ("2001::/32", "a Teredo tunnel address"),
    ("2001::/23", "a reserved address"),
    ("2001:db8::/32", "a documentation address"),
    ("2002::/16", "a 6to4 tunnel address"),
    ("3fff::/20", "a documentation address"),
    ("fc00::/7", "a private address"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a site-local address"),
    ("ff00::/8", "a multicast address"),
)
_V4_REFUSED = tuple((IPv4Network(network), what) for network, what in _V4)
_V6_REFUSED = tuple((IPv6Network(network), what) for network, what in _V6)
_V6_PUBLIC = IPv6Network("2000::/3")
_V6_HOLDS_V4 = tuple(IPv6Network(network) for network in ("::ffff:0:0/96", "64:ff9b::/96", "::ffff:0:0:0/96"))
_V4_COMPATIBLE = IPv6Network("::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)

REFUSED_NAMES = frozenset(
    {
        "localhost", "localhost6", "ip6-localhost", "ip6-loopback", "metadata", "metadata.google.internal", "metadata.goog",
        "instance-data", "host.docker.internal", "gateway.docker.internal",
    }
)  # fmt: skip
REFUSED_ENDINGS = (".localhost", ".localdomain", ".internal", ".local", ".lan", ".intranet", ".home.arpa")


def name_refusal(name: str) -> str | None:
    """Why a host name is refused without asking what it resolves to, or None."""
    plain = name.rstrip(".").lower()
    if plain in REFUSED_NAMES or plain.endswith(REFUSED_ENDINGS):
        return "a name of this machine or of a private network"
    return None


def address_refusal(text: str) -> str | None:
    """What kind of not public address `text` is, or None for a public one. An address that can't be read is refused."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return "an address that can't be read"
    return _refusal(address)


def _refusal(address: Address) -> str | None:
    if isinstance(address, IPv4Address):
        return next((what for network, what in _V4_REFUSED if address in network), None)
    for network, what in _V6_REFUSED:
        if address in network:
            return what
    inner = _inner_v4(address)
    if inner is not None:
        what_inside = _refusal(inner)
        return f"{what_inside} inside an IPv6 one" if what_inside else _outer_refusal(address)
    return None if address in _V6_PUBLIC else "not a public address"


def _inner_v4(address: IPv6Address) -> IPv4Address | None:
    number = int(address)
    if (
        address in _V4_COMPATIBLE
        or any(address in network for network in _V6_HOLDS_V4)
        or ((number >> 32) & 0xFFFFFFFF) in _ISATAP
    ):
        return IPv4Address(number & 0xFFFFFFFF)
    return None


def _outer_refusal(address: IPv6Address) -> str | None:
    """A public IPv4 address inside: fine when mapped or translated, which networks do; else judged as the IPv6 address it is."""
    if any(address in network for network in _V6_HOLDS_V4[:2]) or address in _V6_PUBLIC:
        return None
    return "not a public address"
