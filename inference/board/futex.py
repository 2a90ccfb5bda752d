"""Waiting on a word of shared memory without spinning: Linux's futex, through the system call."""

from __future__ import annotations

import ctypes
import platform
from ctypes import c_int, c_long, c_uint32, c_void_p

WAIT, WAKE = 0, 1  # shared between processes: the private flag is not set
EVERYONE = 2**31 - 1
NUMBERS = {"x86_64": 202, "aarch64": 98}
"""The system call's number by machine."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", c_long), ("nanoseconds", c_long))


class Futex:
    """A 32-bit word in a writable buffer that processes wait on and wake each other by."""

    def __init__(self, buffer: memoryview, offset: int) -> None:
        """Use the word at ``offset`` bytes, a multiple of 4.

        Raises:
            OSError: this machine has no futex that we know the number of.
        """
        if platform.system() != "Linux" or platform.machine() not in NUMBERS:
            raise OSError(f"futex: not known on {platform.system()} {platform.machine()}; prefill needs Linux")
        self._word = c_uint32.from_buffer(buffer, offset)
        self._address = c_void_p(ctypes.addressof(self._word))
        self._number = c_long(NUMBERS[platform.machine()])
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._wake = (self._number, self._address, c_int(WAKE), c_int(EVERYONE), None, None, c_int(0))

    def ring(self) -> None:
        """Change the word and wake everyone who waits for that."""
        self._word.value += 1
        self._call(*self._wake)

    def read(self) -> int:
        """The word, to be given to `wait`."""
        return self._word.value

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until the word differs from ``seen``; whether it does.

        Wakes at the latest after ``timeout_s``, and now and then for no reason.
        """
        whole = int(timeout_s)
        limit = _TimeSpec(whole, int((timeout_s - whole) * 1e9))
        self._call(self._number, self._address, c_int(WAIT), c_uint32(seen), ctypes.byref(limit), None, c_int(0))
        return self._word.value != seen
