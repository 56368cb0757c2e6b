"""What programs in a sandbox are told of its way out: the usual variables for an HTTP proxy and for certificates."""

from __future__ import annotations

import os

from sandbox_images.base.forwarder import FOLDER, PORT

PROXY = f"http://127.0.0.1:{PORT}"
NOT_PROXIED = "localhost,127.0.0.1,::1"
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO")


def proxy_variables(folder: str = FOLDER) -> dict[str, str]:
    """For the environment of whatever may use the door."""
    told = {"HTTP_PROXY": PROXY, "HTTPS_PROXY": PROXY, "NO_PROXY": NOT_PROXIED}
    told |= {name.lower(): value for name, value in told.items()}
    authorities = f"{folder}/ca.pem"  # the system's, and the proxy's own
    if os.path.exists(authorities):
        told |= dict.fromkeys(CERTIFICATES, authorities)
    return told
