"""Which addresses are public, from the table in addresses.toml: `ipaddress.is_global` of Python 3.11 is wrong for several."""

from __future__ import annotations

import tomllib
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_TABLE = tomllib.loads(Path(__file__).with_name("addresses.toml").read_text("utf-8"))
_REFUSED: tuple[tuple[Network, str], ...] = tuple(
    (ip_network(network), entry["what"]) for entry in _TABLE["network"] for network in entry["networks"]
)
_HOLDS_V4 = tuple((IPv6Network(entry["network"]), bool(entry["public"])) for entry in _TABLE["holds_ipv4"])
_V6_PUBLIC = IPv6Network("2000::/3")  # all that was ever given out, by the IANA registry of IPv6 unicast addresses
_ISATAP = (
    0x00005EFE,
    0x02005EFE,
)  # the third quarter of an address that tunnels to the IPv4 one in the fourth, RFC 5214
_NAMES = frozenset(_TABLE["names"]["exact"])
_ENDINGS = tuple(_TABLE["names"]["endings"])


def name_refusal(name: str) -> str | None:
    """Why a host name, in lower case, is refused without asking what it resolves to, or None."""
    if name in _NAMES or name.endswith(_ENDINGS):
        return "a name of this machine or of a private network"
    return None


def address_refusal(text: str) -> str | None:
    """What kind of not public address `text` is, or None for a public one. One that can't be read or has a zone is refused."""
    try:
        address = ip_address(text)
    except ValueError:
        return "an address that can't be read"
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "an address of one link"
    return _refusal(address)


def _refusal(address: Address) -> str | None:
    for network, what in _REFUSED:
        if address.version == network.version and address in network:
            return what
    if isinstance(address, IPv4Address):
        return None
    number = int(address)
    inner = IPv4Address(number & 0xFFFFFFFF)
    for network, public in _HOLDS_V4:
        if address in network:
            inside = _refusal(inner)
            return f"{inside} inside an IPv6 one" if inside else None if public else "not a public address"
    if (number >> 32) & 0xFFFFFFFF in _ISATAP and (inside := _refusal(inner)):
        return f"{inside} inside an IPv6 one"
    return None if address in _V6_PUBLIC else "not a public address"
