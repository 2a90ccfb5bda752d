"""First bytes of connections to a host's port, composed from docs/decisions/one-port.md without the product's code."""

import hashlib
import hmac
import os
import secrets
import struct

from weft.comm.key import WanKey

KEY = WanKey(b"a key for tests, long enough")
JOB = f"an attempt of {os.getpid()}"  # endpoints of one attempt have their names once on a host


def hello_to(whom, *, key=KEY, job=JOB, magic=b"weftdoor"):
    """Return the first bytes for a rank's endpoint of an attempt, or for a service if ``job`` is empty."""
    attempt = hashlib.sha256(job.encode()).digest()[:16] if job else bytes(16)
    said = magic + attempt + struct.pack("<II", whom, 0) + secrets.token_bytes(32)
    return said + hmac.digest(key.derived("door"), said, "sha256")


def is_closed(client, within_s=5.0):
    """True if the other side closes the connection, and says nothing."""
    client.settimeout(within_s)
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False
