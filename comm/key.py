"""The job's shared key, and keys derived from it."""

from __future__ import annotations

import hmac
import os
import ssl
from dataclasses import dataclass, field
from datetime import datetime

VARIABLE = "WEFT_KEY"
_LEAST_BYTES = 16
_REMEDY = 'make one with: python3 -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True)
class WanKey:
    """A shared secret. Peers prove that they have it without sending it."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < _LEAST_BYTES:
            raise ValueError(
                f"{VARIABLE}: {len(self.secret)} bytes are too few, at least {_LEAST_BYTES} are needed; {_REMEDY}"
            )

    @classmethod
    def from_environment(cls) -> WanKey:
        """Read the key from ``WEFT_KEY``, which is the same on every rank.

        Raises:
            ValueError: the variable is not set, or the key is too short.
        """
        if VARIABLE not in os.environ:
            raise ValueError(f"{VARIABLE} is not set: ranks on several hosts authenticate each other by it; {_REMEDY}")
        return cls(os.environ[VARIABLE].encode())

    def derived(self, purpose: str) -> bytes:
        """Return a 32-byte key for one purpose. It reveals neither this key nor other derived keys."""
        return hmac.digest(self.secret, f"weft wan {purpose}".encode(), "sha256")


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
