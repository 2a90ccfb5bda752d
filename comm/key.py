"""The job's shared key, and keys derived from it."""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field

VARIABLE = "WEFT_KEY"
_LEAST_BYTES = 16
_REMEDY = 'make one with: python3 -c "import secrets; print(secrets.token_hex(32))"'


@dataclass(frozen=True)
class WanKey:
    """A shared secret. Peers prove that they have it without sending it."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Validate."""
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
