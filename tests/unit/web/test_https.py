"""The certificate is checked against the name, although the vetted address is what is dialled.

`shop.example.pem` is a self-signed certificate for shop.example with its key, made for this test alone.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_images.base.outcome import Ended
from sandbox_images.base.progress import Progress
from sandbox_images.web import fetch as fetching
from sandbox_images.web.fetch import Bounds, fetch
from sandbox_images.web.settings import Settings
from sandbox_images.web.vetting import Vetting
from sandbox_images.web.web_address import parse
from tests.unit.web.site import Reply, Site, running_site

PEM = Path(__file__).with_name("shop.example.pem")


@pytest.fixture
def shop() -> Iterator[Site]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    with running_site() as site:
        site.socket = context.wrap_socket(site.socket, server_side=True, do_handshake_on_connect=False)
        site.pages["/"] = Reply(b"safe", "text/plain")
        yield site


def vetting(site: Site) -> Vetting:
    async def resolver(_host: str, _port: int) -> list[str]:
        return ["127.0.0.1"]

    return Vetting(Settings(allow_private=frozenset({("127.0.0.1", site.port)})), resolver)


@pytest.fixture
def _trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.create_default_context(cafile=str(PEM))
    monkeypatch.setattr(fetching, "_tls", lambda: context)


@pytest.mark.usefixtures("_trusting")
async def test_a_certificate_for_the_name_is_accepted(shop: Site) -> None:
    page = await fetch(parse(f"https://shop.example:{shop.port}/"), vetting(shop), Progress(), Bounds())
    assert page.body == b"safe"
    assert page.url == f"https://shop.example:{shop.port}/"


@pytest.mark.usefixtures("_trusting")
@pytest.mark.parametrize("host", ["other.example", "127.0.0.1"])
async def test_a_certificate_for_another_name_is_refused(shop: Site, host: str) -> None:
    with pytest.raises(Ended, match="certificate"):
        await fetch(parse(f"https://{host}:{shop.port}/"), vetting(shop), Progress(), Bounds())
    assert shop.seen == []


async def test_a_certificate_that_nobody_vouches_for_is_refused(shop: Site) -> None:
    with pytest.raises(Ended, match="certificate"):
        await fetch(parse(f"https://shop.example:{shop.port}/"), vetting(shop), Progress(), Bounds())
    assert shop.seen == []
