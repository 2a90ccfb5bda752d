"""ctypes bindings of the native transport: `transport.cpp`, compiled at first use.

The transport is a thread of the trainer's process rather than a separate process over shared memory,
so that chunks move between tensor memory and sockets without a copy (measured in docs/wan.md).
ctypes releases the interpreter lock during a call, and the transport's thread never takes it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from weft.comm.native import Kind, build

_FOLDER = Path(__file__).parent
_HEADERS = (
    *("descriptors", "frame", "openssl", "handshake", "stream"),
    *("shared_port", "relay_memory", "message", "connection", "pacer", "outbox", "link_options", "link", "links"),
    *("connections", "endpoint"),
)
# All processors of these families in GPU servers support these instructions.
_FLAGS = {"x86_64": ["-msse4.2"], "aarch64": ["-march=armv8-a+crc"]}
_OPENSSL = (".so.3", ".so.1.1", ".so")


class Options(Structure):
    """``WanOptions`` of transport.cpp."""

    _fields_ = [
        *((name, c_uint32) for name in ("id", "chunk_bytes", "unsent_bytes", "tls")),
        *((name, c_uint32) for name in ("port", "key_bytes", "tls_key_bytes", "port_key_bytes")),
        *((name, c_double) for name in ("deadline_s", "patience_s")),
        *((name, c_char_p) for name in ("job", "host", "key", "tls_key", "port_key", "congestion", "crypto", "ssl")),
    ]


class Counters(Structure):
    """``WanCounters`` of transport.cpp."""

    _fields_ = [
        *((name, c_uint64) for name in ("sent_bytes", "received_bytes", "resent_chunks", "duplicate_chunks")),
        *((name, c_uint64) for name in ("broken", "ready", "queued_bytes", "retransmissions")),
        ("rtt_s", c_double),
        ("busy_s", c_double),
    ]


_FUNCTIONS = {
    "open": (c_void_p, [POINTER(Options), c_char_p, c_size_t]),
    "port": (c_uint32, [c_void_p]),
    "link": (c_int, [c_void_p, c_uint32, c_char_p, c_char_p, c_uint32, c_uint32]),
    "lane": (None, [c_void_p, c_uint32, c_uint32, c_uint64]),
    "use": (None, [c_void_p, c_uint32, c_uint32]),
    "relay": (None, [c_void_p, c_uint32, c_uint32, c_uint32, c_uint32, c_uint64]),
    "send": (c_void_p, [c_void_p, c_uint32, c_uint32, c_char_p, c_uint32, c_void_p, c_uint64]),
    "receive": (c_void_p, [c_void_p, c_uint32, c_uint32, c_char_p, c_void_p, c_uint64]),
    "wait": (c_int, [c_void_p, c_void_p, c_double]),
    "error": (c_char_p, [c_void_p]),
    "free": (None, [c_void_p]),
    "requests": (c_uint64, []),
    "counters": (None, [c_void_p, c_uint32, POINTER(Counters)]),
    "refused": (c_uint64, [c_void_p]),
    "close": (None, [c_void_p, c_double]),
    "checksum": (c_uint32, [c_char_p, c_uint64]),
}


@cache
def load() -> ctypes.CDLL:
    """Compile the library if necessary, and load it. Raise ValueError if compilation failed."""
    sources = [_FOLDER / "transport.cpp", *(_FOLDER / f"{name}.hpp" for name in _HEADERS)]
    path = build(sources, kind=Kind.library, flags=["-ldl", *_FLAGS.get(platform.machine(), [])])
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"weft_wan_{name}")
        function.restype, function.argtypes = result, arguments
    return library


@cache
def openssl() -> tuple[str, str]:
    """Return the names by which libcrypto and libssl can be loaded.

    Raises:
        ValueError: there is no OpenSSL 1.1.1 or newer.
    """
    beside = Path(sys.base_prefix) / "lib"
    for suffix in _OPENSSL:
        for folder in ("", f"{beside}/"):
            names = f"{folder}libcrypto{suffix}", f"{folder}libssl{suffix}"
            try:
                for name in names:
                    ctypes.CDLL(name)
            except OSError:
                continue
            return names
    raise ValueError(
        "the WAN channel needs OpenSSL's libraries, but libcrypto.so.3 was not found; install the package libssl3"
    )
