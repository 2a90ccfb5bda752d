"""Messages on a byte stream: a length, and a JSON object of bounded size and depth."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

MOST_BYTES = 1 << 20
"""Maximum size of a frame, by default."""
MOST_DEPTH = 32
"""Maximum nesting depth of containers."""
_LENGTH_BYTES = 4
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_DECODER = msgspec.json.Decoder(dict[str, Any])
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{\]}]', re.DOTALL)


class FrameError(ValueError):
    """The peer sent an invalid frame."""


def pack(value: dict[str, Any], most_bytes: int = MOST_BYTES) -> bytes:
    """Serialize ``value`` as a frame.

    Raises:
        ValueError: the frame is too large, or contains a number that is not finite.
        TypeError: ``value`` contains a type that JSON does not support.
    """
    data = _ENCODER.encode(value).encode(errors="replace")  # file names may have surrogates, which JSON does not allow
    if len(data) > most_bytes:
        raise ValueError(f"a control message of {len(data)} bytes; the most is {most_bytes}")
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


class Frames:
    """Decodes a byte stream into JSON objects."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Refuse frames longer than ``most_bytes`` as soon as their length is read."""
        self._most_bytes = most_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[dict[str, Any]]:
        """Yield the objects that ``data`` completes.

        Raises:
            FrameError: a frame is too long, nested too deeply, or no JSON object.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if end - _LENGTH_BYTES > self._most_bytes:
                raise FrameError(f"a message of {end - _LENGTH_BYTES} bytes; the most is {self._most_bytes}")
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield _parsed(frame)


def _parsed(frame: bytes) -> dict[str, Any]:
    if frame.count(b"[") + frame.count(b"{") > MOST_DEPTH and _depth(frame) > MOST_DEPTH:
        raise FrameError(f"a message of more than {MOST_DEPTH} containers inside of each other")
    try:
        return _DECODER.decode(frame)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON object: {str(error)[:100]}") from error


def _depth(frame: bytes) -> int:
    """Return the maximum nesting depth of containers."""
    depth = most = 0
    for token in _TOKENS.finditer(frame):
        first = frame[token.start()]
        depth += (first in b"[{") - (first in b"]}")
        most = max(most, depth)
    return most
