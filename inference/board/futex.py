"""Linux's futex: blocking on a word of shared memory."""

from __future__ import annotations

import ctypes
import platform
from ctypes import c_int, c_long, c_uint32, c_void_p

WAIT, WAKE = 0, 1  # shared between processes: the private flag is not set
ALL_WAITERS = 2**31 - 1
NUMBERS = {"x86_64": 202, "aarch64": 98}
"""System call number by machine."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class Futex:
    """A 32-bit word in shared memory that processes wait on."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        """Use the word at ``offset`` bytes, a multiple of 4.

        Raises:
            OSError: unsupported platform.
        """
        if platform.system() != "Linux" or platform.machine() not in NUMBERS:
            raise OSError(f"futex: not supported on {platform.system()} {platform.machine()}; prefill needs Linux")
        self._word = c_uint32.from_buffer(buffer, offset)
        self._address = c_void_p(ctypes.addressof(self._word))
        self._number = c_long(NUMBERS[platform.machine()])
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._wake = (self._number, self._address, c_int(WAKE), c_int(ALL_WAITERS), None, None, c_int(0))

    def ring(self) -> None:
        """Increment the word and wake all waiters."""
        self._word.value += 1
        self._call(*self._wake)

    def read(self) -> int:
        """Return the current value, to be passed to `wait`."""
        return self._word.value

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Block until the word differs from ``seen``, for at most ``timeout_s``. Return False after a time-out.

        Spurious wake-ups are possible.
        """
        seconds = int(timeout_s)
        limit = _TimeSpec(seconds, int((timeout_s - seconds) * 1e9))
        self._call(self._number, self._address, c_int(WAIT), c_uint32(seen), ctypes.byref(limit), None, c_int(0))
        return self._word.value != seen
