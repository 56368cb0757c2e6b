"""A web site on the engine's bridge: an address that sandboxes reach through the egress proxy alone, when it is allowed."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def on_the_bridge(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Its `host:port`, while the block runs."""
    command = ["docker", "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Gateway}}"]
    host = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "172.17.0.1"
    server = ThreadingHTTPServer((host, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
