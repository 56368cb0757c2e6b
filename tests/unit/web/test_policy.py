"""What may be reached: that is the proxy's to say, for each hop; here it is asked, and its answer is told."""

from __future__ import annotations

import pytest

from sandbox_images.web.settings import BRAVE_KEY, read
from sandbox_images.web.web_address import follow, parse
from tests.unit.web.site import Reply, Site, redirect
from tests.unit.web.stand_in_proxy import StandInProxy
from tests.unit.web.worker_process import Worker, running_worker

SCHEMES = ["file:///etc/passwd", "ftp://127.0.0.1/", "gopher://127.0.0.1:1/x", "data:text/html,x", "dict://127.0.0.1:1/", "javascript:alert(1)", "unix:///x"]  # fmt: skip


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:{port}/", "http://a.example:{port}/x?y", "https://127.0.0.1:{port}/", "https://a.example/"],
)
def test_what_the_proxy_refuses_is_denied_with_its_rule(worker: Worker, canary: Site, url: str) -> None:
    ending = worker.fetch(url.format(port=canary.port))
    assert ending.end == "denied", ending
    assert "refused by the egress policy (rule: nothing allows it)" in ending.message
    (denied,) = ending.outcome["denied"]
    assert denied["rule"] == "nothing allows it"
    assert f"{denied['host']}:{denied['port']}" in ending.message


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_redirect_is_asked_for_anew(
    worker: Worker, site: Site, canary: Site, proxy: StandInProxy, scheme: str
) -> None:
    site.pages["/out"] = redirect(f"{scheme}://b.example:{canary.port}/secret")
    ending = worker.fetch(site.url("/out"))
    assert ending.end == "denied"
    assert ending.outcome["denied"] == [{"host": "b.example", "port": canary.port, "rule": "nothing allows it"}]


@pytest.mark.parametrize("form", SCHEMES)
def test_other_schemes_are_denied_without_asking(worker: Worker, site: Site, proxy: StandInProxy, form: str) -> None:
    before = len(proxy.asked)
    ending = worker.fetch(form)
    assert (ending.end, "Only http and https" in ending.message) == ("denied", True)
    assert len(proxy.asked) == before
    site.pages["/out"] = redirect(form)
    assert worker.fetch(site.url("/out")).end == "denied"


def test_a_redirect_to_another_host_is_told(worker: Worker, site: Site, proxy: StandInProxy) -> None:
    proxy.let(site.port, "elsewhere.example")
    site.pages["/away"] = redirect(f"http://elsewhere.example:{site.port}/there")
    site.pages["/there"] = Reply(b"arrived", "text/plain")
    ending = worker.fetch(site.url("/away"))
    assert ending.text == "arrived"
    assert ending.structured["final_url"] == f"http://elsewhere.example:{site.port}/there"
    assert "another host" in ending.texts[0]
    assert f"host: elsewhere.example:{site.port}" in site.seen[-1].lower()


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_what_the_proxy_can_not_reach_fails_in_its_words(worker: Worker, proxy: StandInProxy, scheme: str) -> None:
    proxy.down.add("gone.example")
    ending = worker.fetch(f"{scheme}://gone.example/")
    assert ending.end == "failed"
    assert "The name has no address." in ending.message


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_without_a_way_out_the_answer_says_how_to_get_one(scheme: str) -> None:
    with running_worker() as worker:
        ending = worker.fetch(f"{scheme}://a.example/")
    assert ending.end == "denied"
    assert '{"egress": {"mode": "open"}}' in ending.message


def test_a_session_has_no_proxy_of_its_own(worker: Worker, canary: Site, proxy: StandInProxy) -> None:
    with running_worker(proxy) as own:
        own.ask("toolcrib/bind", env={"HTTP_PROXY": canary.url(), "HTTPS_PROXY": canary.url()}, limits={})
        assert own.fetch("http://a.example/").end == "denied"


def test_a_door_that_can_not_be_opened_is_said(worker: Worker) -> None:
    """No forwarder can come up here: this machine has no folder of doors."""
    said = worker.wait(worker.send("toolcrib/egress", {"door": "0" * 32}))
    assert said["error"]["data"]["kind"] == "egress_unready"
    assert worker.wait(worker.send("toolcrib/egress", {"door": "../x"}))["error"]["code"] == -32602
    assert worker.ask("toolcrib/egress", door=None) == {}


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


def test_addresses_are_taken_apart_the_same_way_everywhere() -> None:
    address = parse("HTTPS://Exämple.ORG:443/a b/ü?x=ä|1#part".replace(" ", "%20"))
    assert str(address) == "https://xn--exmple-cua.org/a%20b/%C3%BC?x=%C3%A4%7C1"
    assert str(parse("http://[2606:4700::1111]:8080")) == "http://[2606:4700::1111]:8080/"
    assert str(follow(parse("http://x.example/a/b?c"), "../d?e#f")) == "http://x.example/d?e"
    assert str(follow(parse("http://x.example/a"), "//y.example/a b")) == "http://y.example/a%20b"


def test_keys_are_not_shown() -> None:
    assert "brave-key-1" not in repr(read({BRAVE_KEY: "brave-key-1"}))
