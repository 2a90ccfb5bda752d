"""TLS by a shared key: both sides derive one certificate from it, and accept no other."""

from __future__ import annotations

import os
import ssl
from datetime import datetime

from weft.comm.key import WanKey


def contexts(key: WanKey, purpose: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS 1.3 contexts of the listening and of the connecting side; each proves the key to the other.

    Args:
        purpose: part of the key derivation. A certificate for one purpose is not valid for another.

    Raises:
        ValueError: the package `cryptography` is not installed.
    """
    certificate, private = _certificate(key.derived(purpose))
    return (
        _context(ssl.PROTOCOL_TLS_SERVER, certificate, private),
        _context(ssl.PROTOCOL_TLS_CLIENT, certificate, private),
    )


def _context(protocol: int, certificate: str, private: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # holders of the key are trusted, at any address
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection proves the key anew
    context.load_verify_locations(cadata=certificate)
    with os.fdopen(os.memfd_create("weft-control", os.MFD_CLOEXEC), "w") as file:  # ssl reads keys from files only
        file.write(private + certificate)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _certificate(seed: bytes) -> tuple[str, str]:
    """Return a certificate and its private key as PEM, derived from ``seed`` only: every process makes the same pair.

    Args:
        seed: 32 bytes.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        raise ValueError("TLS between hosts needs a package: pip install cryptography") from error
    private = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "weft")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(1)
        # Clocks may be wrong by any amount, so certificates do not expire. The key belongs to one job.
        .not_valid_before(datetime(1970, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(private, None)
    )
    return (
        certificate.public_bytes(Encoding.PEM).decode(),
        private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
    )
