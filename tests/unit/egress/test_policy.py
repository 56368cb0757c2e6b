"""Egress policies: one canonical form for each rule, clear refusals, and what two policies both allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolserver.egress.policy import MAX_RULES, EgressPolicy, canonical_host, narrowed


def allow(*rules: str) -> EgressPolicy:
    return EgressPolicy("allow", rules)


@pytest.mark.parametrize(
    ("rule", "canonical"),
    [
        ("example.org", ("example.org:443", "example.org:80")),
        ("Example.ORG.:443", ("example.org:443",)),
        ("example.org:*", ("example.org:*",)),
        ("*.example.org:443", ("*.example.org:443",)),
        ("*.example.org", ("*.example.org:443", "*.example.org:80")),
        ("192.0.2.7:8080", ("192.0.2.7:8080",)),
        ("[2001:DB8:0::7]:443", ("[2001:db8::7]:443",)),
        ("[2001:db8::7]", ("[2001:db8::7]:443", "[2001:db8::7]:80")),
        ("bücher.example:443", ("xn--bcher-kva.example:443",)),
        ("XN--BCHER-KVA.example:443", ("xn--bcher-kva.example:443",)),
        ("example。org:443", ("example.org:443",)),
        ("①②⑦.0.0.1:80", ("127.0.0.1:80",)),
        ("_dmarc.example.org:53", ("_dmarc.example.org:53",)),
    ],
)
def test_a_rule_has_one_canonical_form(rule: str, canonical: tuple[str, ...]) -> None:
    policy = allow(rule)
    assert policy.allow == canonical
    assert EgressPolicy.load(policy.as_json()) == policy


@pytest.mark.parametrize(
    "rule",
    ["", ":443", "*", "*:443", "*.:443", "**.example.org", "a.*.org:443", "example.org:", "example.org:0", "example.org:65536", "example.org:080",
     "example.org:https", "example.org:٤٤٣", "example.org:-1", "http://example.org", "http://example.org:80", "user@example.org:443", "example.org/x:443",
     "2001:db8::7:443", "[2001:db8::7", "[example.org]:443", "[fe80::1%eth0]:443", "127.1:80", "2130706433:80", "0x7f.0.0.1:80", "0177.0.0.1:80",
     "1.2.3.4.5:80", "256.1.1.1:80", "*.127.0.0.1:80", "*.[::1]:80", "exa mple.org:443", "exa\nmple.org:443", "a..b:443", "-a.org:443", "%6c.org:443",
     "a" * 64 + ".org:443", "a." * 150 + "org:443", "\ud800.org:443"],
    ids=lambda rule: ascii(rule)[:40],
)  # fmt: skip
def test_what_is_no_rule_is_refused_with_a_sentence(rule: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)^An? .*\.$|^The .*") as problem:
        allow(rule)
    assert len(str(problem.value)) < 400


@pytest.mark.parametrize(
    ("told", "policy"),
    [
        ({}, EgressPolicy()),
        ({"mode": "none"}, EgressPolicy("none")),
        ({"mode": "open", "allow": []}, EgressPolicy("open")),
        ({"mode": "open", "allow": None}, EgressPolicy("open")),
        ({"allow": ["example.org:443"]}, allow("example.org:443")),
        ({"mode": "allow"}, allow()),
    ],
)
def test_a_policy_is_read_from_json(told: dict[str, object], policy: EgressPolicy) -> None:
    assert EgressPolicy.load(told) == policy


@pytest.mark.parametrize(
    "told",
    [{"mode": "all"}, {"mode": 3}, {"mode": ["open"]}, {"mode": "open", "allow": ["example.org"]}, {"mode": "none", "allow": ["example.org"]},
     {"mode": "allow", "allow": "example.org"}, {"mode": "allow", "allow": [1]}, {"mode": "allow", "deny": []},
     {"mode": "allow", "allow": [f"h{number}.example.org:443" for number in range(MAX_RULES + 1)]}],
    ids=lambda told: ascii(told)[:60],
)  # fmt: skip
def test_what_is_no_policy_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="egress"):
        EgressPolicy.load(told)


def test_an_empty_list_allows_nothing() -> None:
    assert not allow().reaches_out
    assert not EgressPolicy().reaches_out
    assert EgressPolicy("open").reaches_out


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (EgressPolicy(), EgressPolicy("open"), EgressPolicy()),
        (EgressPolicy("open"), EgressPolicy("open"), EgressPolicy("open")),
        (EgressPolicy("open"), allow("a.org:1"), allow("a.org:1")),
        (EgressPolicy(), allow("a.org:1"), EgressPolicy()),
        (allow("a.org:1", "b.org:1"), allow("b.org:1", "c.org:1"), allow("b.org:1")),
        (allow("a.org:*"), allow("a.org"), allow("a.org")),
        (allow("*.a.org:*"), allow("x.a.org:7", "a.org:7"), allow("x.a.org:7")),
        (allow("*.a.org:443"), allow("*.b.a.org:*"), allow("*.b.a.org:443")),
        (allow("*.a.org:443"), allow("*.a.org:80"), allow()),
        (allow("*.a.org:443"), allow("ba.org:443"), allow()),
    ],
)
def test_narrowed_is_what_both_allow(one: EgressPolicy, other: EgressPolicy, both: EgressPolicy) -> None:
    assert narrowed(one, other) == both
    assert narrowed(other, one) == both


HOSTS = ("a.org", "*.a.org", "x.a.org", "*.x.a.org", "y.x.a.org", "b.org")
PORTS = ("80", "443", "*")
POLICIES = st.one_of(
    st.sampled_from([EgressPolicy(), EgressPolicy("open")]),
    st.lists(st.tuples(st.sampled_from(HOSTS), st.sampled_from(PORTS)), max_size=6).map(
        lambda rules: allow(*(f"{host}:{port}" for host, port in rules))
    ),
)


def permits(policy: EgressPolicy, host: str, port: int) -> bool:
    def fits(rule: str) -> bool:
        name, wanted = rule.rsplit(":", 1)
        return wanted in ("*", str(port)) and (name == host or (name[0] == "*" and host.endswith(name[1:])))

    return policy.mode == "open" or any(fits(rule) for rule in policy.allow)


@given(
    one=POLICIES,
    other=POLICIES,
    host=st.sampled_from([host for host in HOSTS if "*" not in host]),
    port=st.sampled_from([80, 443, 8080]),
)
def test_narrowed_permits_exactly_what_both_permit(
    one: EgressPolicy, other: EgressPolicy, host: str, port: int
) -> None:
    both = permits(one, host, port) and permits(other, host, port)
    assert permits(narrowed(one, other), host, port) == both


@given(text=st.text(max_size=40))
def test_a_host_is_canonical_or_refused(text: str) -> None:
    try:
        host = canonical_host(text)
    except ValueError:
        return
    assert canonical_host(f"[{host}]" if ":" in host else host) == host
    assert host.isascii()
    assert host == host.lower()
