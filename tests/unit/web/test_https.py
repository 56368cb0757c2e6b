"""The certificate is the page's own, checked through the proxy's tunnel against the name that was asked for.

`shop.example.pem` is a self-signed certificate for shop.example with its key, made for this test alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_images.base import door
from sandbox_images.base.outcome import Ended
from sandbox_images.base.progress import Progress
from sandbox_images.web import fetch as fetching
from sandbox_images.web.fetch import Bounds, fetch
from sandbox_images.web.web_address import parse
from tests.unit.web.site import Reply, Site, running_site
from tests.unit.web.stand_in_proxy import StandInProxy

PEM = Path(__file__).with_name("shop.example.pem")


@pytest.fixture
def shop(proxy: StandInProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(door, "PROXY", proxy.url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    with running_site() as site:
        site.socket = context.wrap_socket(site.socket, server_side=True, do_handshake_on_connect=False)
        site.pages["/"] = Reply(b"safe", "text/plain")
        proxy.let(site.port, "shop.example", "other.example", "127.0.0.1")
        yield site


@pytest.fixture
def _trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(cafile=str(PEM))
    monkeypatch.setattr(fetching, "_tls", lambda: context)


@pytest.mark.usefixtures("_trusting")
async def test_a_certificate_for_the_name_is_accepted(shop: Site, proxy: StandInProxy) -> None:
    page = await fetch(parse(f"https://shop.example:{shop.port}/"), Progress(), Bounds())
    assert page.body == b"safe"
    assert page.url == f"https://shop.example:{shop.port}/"
    assert proxy.asked[-1] == f"CONNECT shop.example:{shop.port}"


@pytest.mark.usefixtures("_trusting")
@pytest.mark.parametrize("host", ["other.example", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(shop: Site, host: str) -> None:
    with pytest.raises(Ended, match="certificate"):
        await fetch(parse(f"https://{host}:{shop.port}/"), Progress(), Bounds())
    assert shop.seen == []


async def test_a_certificate_that_nobody_vouches_for_is_refused(shop: Site) -> None:
    with pytest.raises(Ended, match="certificate"):
        await fetch(parse(f"https://shop.example:{shop.port}/"), Progress(), Bounds())
    assert shop.seen == []
