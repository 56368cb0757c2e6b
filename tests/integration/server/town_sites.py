"""Run in a namespace of a town: `python -m … sites|canaries FOLDER REACHED`. Sites, a resolver, and listeners that nobody should reach."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import struct
import sys
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from sandbox_images.egress.authority import Authority

PUBLIC, OWN = "93.184.216.34", "93.184.216.35"  # of the world; of the machine
NAMES = {
    "public.example": [PUBLIC],
    "other.example": [PUBLIC],
    "secure.example": [PUBLIC],
    "turning.example": [PUBLIC, "127.0.0.1"],  # one after the other
    "mixed.example": [PUBLIC, "127.0.0.1"],
    "inner.example": ["172.17.0.1"],
    "loop.example": ["127.0.0.1"],
    "six.example": ["::1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "own.example": [OWN],
    "cloud.example": ["169.254.169.254"],
}
_A, _AAAA = 1, 28
_asked: Counter[str] = Counter()


class Resolver(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        labels, place = [], 12
        while size := data[place]:
            labels.append(data[place + 1 : place + 1 + size].decode().lower())
            place += 1 + size
        name, (kind,) = ".".join(labels), struct.unpack("!H", data[place + 1 : place + 3])
        question = data[12 : place + 5]
        found = NAMES.get(name)
        addresses = [ip_address(one) for one in found or () if (":" in one) == (kind == _AAAA) and kind in (_A, _AAAA)]
        if name == "turning.example" and kind == _A:
            addresses = [addresses[_asked[name] % 2]]
            _asked[name] += 1
        flags = 0x8180 if found is not None else 0x8183
        answer = data[:2] + struct.pack("!HHHHH", flags, 1, len(addresses), 0, 0) + question
        for address in addresses:
            answer += b"\xc0\x0c" + struct.pack("!HHIH", kind, 1, 0, len(address.packed)) + address.packed
        self._transport.sendto(answer, addr)


async def _take(folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    address, port = writer.get_extra_info("sockname")[:2]
    told = {"address": address.removeprefix("::ffff:"), "port": port, "head": ""}
    head = b""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        path = head.split(b" ")[1]
        host = next((line[6:] for line in head.split(b"\r\n") if line.lower().startswith(b"host: ")), b"")
        if path.startswith(b"/to?"):
            answer = b"HTTP/1.1 302 Found\r\nLocation: %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % path[4:]
        else:
            said = b"<html><body><p>The site %b says hello.</p><pre>%b</pre></body></html>" % (host, head)
            answer = (
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
                % (len(said), said)
            )
        writer.write(answer)
        await writer.drain()
    except (OSError, IndexError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        told["head"] = head.decode("latin-1")
        with (folder / "guests.jsonl").open("a") as file:
            file.write(json.dumps(told) + "\n")
        writer.close()


async def main(role: str, folder: Path, reached: str) -> None:
    (folder / "guests.jsonl").touch()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.get_extra_info("sockname")[0].removeprefix("::ffff:") != reached:
            await _take(folder, reader, writer)

    servers = [await asyncio.start_server(take, None, 80)]
    if role == "sites":
        authority = Authority()
        context = authority.context(PUBLIC)

        def choose(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            tls.context = authority.context(name or PUBLIC)

        context.sni_callback = choose
        servers.append(await asyncio.start_server(take, None, 443, ssl=context))
        (folder / "authority.pem").write_text(authority.pem)
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(Resolver, ("0.0.0.0", 53))
    else:
        servers += [await asyncio.start_server(take, None, port) for port in (443, 8080)]
    (folder / f"{role}.ready").touch()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
