"""What may be reached: public addresses, whatever they are written as, and what the operator named."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sandbox_images.base.outcome import Ended
from sandbox_images.base.progress import Progress
from sandbox_images.web.addresses import address_refusal
from sandbox_images.web.fetch import Bounds, fetch
from sandbox_images.web.settings import BRAVE_KEY, Settings, read
from sandbox_images.web.vetting import Vetting
from sandbox_images.web.web_address import follow, parse
from tests.unit.web.site import Reply, Site, redirect
from tests.unit.web.worker_process import Worker, running_worker

# {port} is where a listener waits that must never be connected to
FORMS = [
    "http://127.0.0.1:{port}/",
    "http://localhost:{port}/",
    "http://LOCALHOST.:{port}/",
    "http://a.localhost:{port}/",
    "http://[::1]:{port}/",
    "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://0.0.0.0:{port}/",
    "http://0:{port}/",
    "http://[::]:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.1:{port}/",
    "http://0x7F.0x0.0x0.0x1:{port}/",
    "http://127.1:{port}/",
    "http://127.0.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://017700000001:{port}/",
    "http://127.127.127.127:{port}/",
    "http://127.0.0.1.:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://ⓛⓞⓒⓐⓛⓗⓞⓢⓣ:{port}/",
    "http://127。0。0。1:{port}/",
    "http://１２７.0.0.1:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[::ffff:0:127.0.0.1]:{port}/",
    "http://[64:ff9b::127.0.0.1]:{port}/",
    "http://[64:ff9b:1::7f00:1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[2001:0:7f00:1::]:{port}/",
    "http://[2606:4700::5efe:7f00:1]:{port}/",
    "http://[fe80::1]:{port}/",
    "http://[fec0::1]:{port}/",
    "http://[fc00::1]:{port}/",
    "http://[fd00:ec2::254]/",
    "http://[ff02::1]:{port}/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://169.254.170.2/",
    "http://2852039166/",
    "http://192.0.0.192/",
    "http://100.100.100.200/",
    "http://168.63.129.16/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://10.0.0.1/",
    "http://172.17.0.1:{port}/",
    "http://172.31.255.255/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://198.18.0.1/",
    "http://192.0.2.1/",
    "http://203.0.113.7/",
    "http://224.0.0.1/",
    "http://240.0.0.1/",
    "http://255.255.255.255/",
    "http://host.docker.internal:{port}/",
    "http://printer.local/",
    "https://127.0.0.1:{port}/",
]
SCHEMES = [
    "file:///etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1:{port}/x",
    "data:text/html,x",
    "dict://127.0.0.1:{port}/",
    "javascript:alert(1)",
    "unix:///x",
]


@pytest.mark.parametrize("form", FORMS + SCHEMES)
def test_what_is_not_public_is_denied_and_never_connected_to(worker: Worker, canary: Site, form: str) -> None:
    ending = worker.fetch(form.format(port=canary.port))
    assert ending.end == "denied", ending
    assert "refused: it" in ending.message or "Only http and https" in ending.message
    assert canary.connections == 0


@pytest.mark.parametrize("form", FORMS + SCHEMES)
def test_a_redirect_to_what_is_not_public_is_denied(worker: Worker, site: Site, canary: Site, form: str) -> None:
    target = form.format(port=canary.port)
    site.pages["/out"] = redirect(target.encode().decode("latin-1"))  # what is not ASCII goes as UTF-8
    ending = worker.fetch(site.url("/out"))
    assert ending.end in ("denied", "invalid") if not target.isascii() else ending.end == "denied", ending
    assert canary.connections == 0


@pytest.mark.parametrize(
    "url",
    ["", " ", "no address", "http://", "http:///x", "http://user:pw@example.org/", "http://good.example@127.0.0.1/", "http://a b/", "http://x\\@y/",
     "http://[::1/", "http://example.org:99999/", "http://example.org:0/", "http://exa\nmple.org/", "http://example.org/\x00", "//example.org/",
     "example.org", "http://" + "a" * 9_000, "http://-.\u2028/", "http://%31%32%37.0.0.1/"],
)  # fmt: skip
def test_what_is_no_web_address_is_invalid(worker: Worker, url: str) -> None:
    ending = worker.fetch(url)
    assert ending.end == "invalid", ending
    assert ending.outcome["errors"][0]["pointer"] == "/url"


def test_the_exception_of_the_operator_is_for_that_port_alone(worker: Worker, site: Site, canary: Site) -> None:
    site.pages["/ok"] = Reply(b"fine", "text/plain")
    assert worker.fetch(site.url("/ok")).text == "fine"
    assert worker.fetch(f"http://127.1:{site.port}/ok").text == "fine"  # the same address
    assert worker.fetch(canary.url("/")).end == "denied"


def test_a_session_cannot_widen_what_may_be_reached(canary: Site) -> None:
    with running_worker() as worker:
        worker.ask(
            "toolcrib/bind",
            env={"TOOLCRIB_WEB_ALLOW_PRIVATE": f"127.0.0.1:{canary.port}", "HTTP_PROXY": canary.url()},
            limits={},
        )
        assert worker.fetch(canary.url("/")).end == "denied"


def resolving_to(*addresses: str, **settings: frozenset[tuple[str, int]]) -> Vetting:
    async def resolver(_host: str, _port: int) -> list[str]:
        return list(addresses)

    return Vetting(Settings(**settings), resolver)  # type: ignore[arg-type]


async def vetted(vetting: Vetting, url: str) -> str:
    try:
        return ",".join(await vetting.addresses(parse(url)))
    except Ended as ended:
        return f"{ended.outcome.end}: {ended.outcome.message}"


@pytest.mark.parametrize(
    "addresses",
    [("10.1.2.3",), ("::1",), ("93.184.216.34", "10.0.0.1"), ("93.184.216.34", "::ffff:127.0.0.1"), ("2606:4700::1111", "fe80::1%eth0"), ("nonsense",), ("169.254.169.254",)],
)  # fmt: skip
async def test_a_name_with_any_address_that_is_not_public_is_denied(addresses: tuple[str, ...]) -> None:
    said = await vetted(resolving_to(*addresses), "http://innocent.example/")
    assert said.startswith("denied: innocent.example:80 is refused: it resolves to")


async def test_a_public_name_gives_its_vetted_addresses() -> None:
    assert (
        await vetted(resolving_to("93.184.216.34", "2606:4700::1111"), "https://innocent.example/")
        == "93.184.216.34,2606:4700::1111"
    )


async def test_the_operator_may_allow_a_name_or_an_address() -> None:
    assert (
        await vetted(resolving_to("10.0.0.5", allow_private=frozenset({("wiki.corp", 8080)})), "http://wiki.corp:8080/")
        == "10.0.0.5"
    )
    assert (
        await vetted(resolving_to("10.0.0.5", allow_private=frozenset({("10.0.0.5", 80)})), "http://wiki.corp/")
        == "10.0.0.5"
    )
    assert (
        await vetted(resolving_to("10.0.0.6", allow_private=frozenset({("10.0.0.5", 80)})), "http://wiki.corp/")
    ).startswith("denied")
    assert (
        await vetted(resolving_to("10.0.0.5", allow_private=frozenset({("wiki.corp", 8080)})), "http://wiki.corp/")
    ).startswith("denied")


async def test_a_name_without_address_or_with_a_slow_resolver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(_host: str, _port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    async def slow(_host: str, _port: int) -> list[str]:
        await asyncio.sleep(30)
        return []

    assert (await vetted(Vetting(Settings(), gone), "http://x.example/")).startswith(
        "failed: The name x.example has no address"
    )
    monkeypatch.setattr("sandbox_images.web.vetting.RESOLVE_TIMEOUT_S", 0.05)
    assert "could not be resolved" in await vetted(Vetting(Settings(), slow), "http://x.example/")


async def test_the_vetted_address_is_dialled_with_the_name_as_host(site: Site) -> None:
    """A second, different answer of the resolver is never asked for: no rebinding."""
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def rebinding(_host: str, _port: int) -> list[str]:
        return answers.pop(0)

    site.pages["/named"] = Reply(b"named", "text/plain")
    vetting = Vetting(Settings(allow_private=frozenset({("127.0.0.1", site.port)})), rebinding)
    page = await fetch(parse(f"http://shop.example:{site.port}/named?q=1"), vetting, Progress(), Bounds())
    assert page.body == b"named"
    assert page.url == f"http://shop.example:{site.port}/named?q=1"
    assert f"host: shop.example:{site.port}" in site.seen[-1].lower()
    assert len(answers) == 1


async def test_each_hop_is_vetted_by_its_own_name(site: Site) -> None:
    async def resolver(host: str, _port: int) -> list[str]:
        return ["127.0.0.1"] if host == "a.example" else ["10.9.9.9"]

    site.pages["/hop"] = redirect(f"http://b.example:{site.port}/secret")
    vetting = Vetting(Settings(allow_private=frozenset({("127.0.0.1", site.port)})), resolver)
    with pytest.raises(Ended, match=r"b\.example:\d+ is refused: it resolves to 10\.9\.9\.9"):
        await fetch(parse(f"http://a.example:{site.port}/hop"), vetting, Progress(), Bounds())


@pytest.mark.parametrize(
    "public",
    ["93.184.216.34", "8.8.8.8", "1.1.1.1", "172.15.255.255", "172.32.0.1", "100.63.255.255", "100.128.0.1", "192.0.1.1", "223.255.255.255",
     "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)  # fmt: skip
def test_public_addresses_are_public(public: str) -> None:
    assert address_refusal(public) is None


def test_addresses_are_taken_apart_the_same_way_everywhere() -> None:
    address = parse("HTTPS://Exämple.ORG:443/a b/ü?x=ä|1#part".replace(" ", "%20"))
    assert str(address) == "https://xn--exmple-cua.org/a%20b/%C3%BC?x=%C3%A4%7C1"
    assert str(parse("http://[2606:4700::1111]:8080")) == "http://[2606:4700::1111]:8080/"
    assert str(follow(parse("http://x.example/a/b?c"), "../d?e#f")) == "http://x.example/d?e"
    assert str(follow(parse("http://x.example/a"), "//y.example/a b")) == "http://y.example/a%20b"


def test_the_operators_settings_are_read_strictly_and_keys_are_not_shown() -> None:
    settings = read({"TOOLCRIB_WEB_ALLOW_PRIVATE": " Wiki:80 , [::1]:8080,10.0.0.1:1", BRAVE_KEY: "brave-key-1"})
    assert settings.allow_private == {("wiki", 80), ("::1", 8080), ("10.0.0.1", 1)}
    assert "brave-key-1" not in repr(settings)
    for bad in ("wiki", "wiki:", ":80", "wiki:0", "wiki:99999", "10.0.0.0/8"):
        with pytest.raises(ValueError, match="not host:port"):
            read({"TOOLCRIB_WEB_ALLOW_PRIVATE": bad})
