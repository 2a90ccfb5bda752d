"""Proofs that both ends of a request have the key, which is not sent: no listener learns it or can forge an answer."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

SCHEME = b"weft"
"""Scheme of the Authorization header `Weft NONCE:PROOF`."""
HEADER = "x-weft-proof"
"""Header of an answer with its proof."""


def new_nonce() -> str:
    """Return a nonce for one request."""
    return secrets.token_hex(16)


def request_proof(key: bytes, nonce: str) -> str:
    """Return the proof of a request."""
    return hmac.digest(key, b"request " + nonce.encode(), "sha256").hex()


def answer_proof(key: bytes, nonce: str, request: bytes, answer: bytes) -> str:
    """Return the proof of an answer, which holds for the body of this request only."""
    parts = b"answer " + nonce.encode() + sha256(request).digest() + sha256(answer).digest()
    return hmac.digest(key, parts, "sha256").hex()


def nonce_of(key: bytes, credentials: bytes) -> str | None:
    """Return the nonce of a request if its proof is right, or None."""
    nonce, _, proof = credentials.decode("latin-1").partition(":")
    return nonce if nonce and hmac.compare_digest(request_proof(key, nonce).encode(), proof.encode()) else None
