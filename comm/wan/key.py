"""The key that all ranks of a job share, and what is derived from it."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field

VARIABLE = "WEFT_KEY"
_LEAST_BYTES = 16
_REMEDY = 'make one with: python3 -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True)
class WanKey:
    """A shared secret. Peers prove that they have it; it never travels."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse a key that could be guessed."""
        if len(self.secret) < _LEAST_BYTES:
            raise ValueError(f"{VARIABLE}: {len(self.secret)} bytes are too few, {_LEAST_BYTES} the least; {_REMEDY}")

    @classmethod
    def from_environment(cls) -> WanKey:
        """The key in ``WEFT_KEY``, the same on every rank.

        Raises:
            ValueError: it is not set, or too short.
        """
        if VARIABLE not in os.environ:
            raise ValueError(f"{VARIABLE} is not set: ranks of several hosts know each other by it; {_REMEDY}")
        return cls(os.environ[VARIABLE].encode())

    def derived(self, purpose: str) -> bytes:
        """32 bytes for one purpose, from which neither the key nor another purpose's can be told."""
        return hmac.digest(self.secret, f"weft wan {purpose}".encode(), "sha256")
