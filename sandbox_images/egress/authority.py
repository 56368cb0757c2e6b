"""A certificate authority of the proxy's own, made at its first use and kept in memory, for hosts that get a secret header.

Sandboxes trust it beside the system's authorities, through `ca.pem` in the folder of their door.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from datetime import UTC, datetime, timedelta
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_DAYS, _LEAF_DAYS, _RENEW_S = 3650, 30, 7 * 86_400
_MAX_CONTEXTS = 256
_PEM = serialization.Encoding.PEM


class Authority:
    """Makes a server's TLS context for one host at a time."""

    def __init__(self) -> None:
        self._contexts: dict[str, tuple[float, ssl.SSLContext]] = {}

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def _leaf_key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def _certificate(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Toolcrib egress proxy {secrets.token_hex(4)}")])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        return (
            self._builder(name, name, self._key.public_key(), _CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> str:
        """Its certificate."""
        return self._certificate.public_bytes(_PEM).decode("ascii")

    def context(self, host: str) -> ssl.SSLContext:
        """For a server that is `host`, a name or an address. Speaks HTTP/1.1 alone."""
        made, context = self._contexts.get(host, (0.0, None))
        if context is None or time.monotonic() - made > _RENEW_S:
            context = self._context(host)
            while len(self._contexts) >= _MAX_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[host] = time.monotonic(), context
        return context

    def _context(self, host: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        key = self._leaf_key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        with os.fdopen(os.memfd_create("certificate", os.MFD_CLOEXEC), "wb") as file:  # OpenSSL wants a path
            file.write(key + self._leaf(host).public_bytes(_PEM) + self.pem.encode())
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context

    def _leaf(self, host: str) -> x509.Certificate:
        try:
            alternative: x509.GeneralName = x509.IPAddress(ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            self._builder(name, self._certificate.subject, self._leaf_key.public_key(), _LEAF_DAYS)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _builder(
        self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def system_authorities() -> str:
    """The certificates that this machine trusts, as PEM; nothing where it has none."""
    paths = ssl.get_default_verify_paths()
    for place in (paths.cafile, "/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"):
        if place and Path(place).is_file():
            return Path(place).read_text("utf-8", "replace")
    return ""
