"""Commits the fault that ``WEFT_FAULT`` names, in a library that is built as the transport is (see `sanitized`)."""

import ctypes
import os
import platform
from pathlib import Path

from weft.comm.native import Kind, build
from weft.comm.wan import library


def test_the_fault():
    source = Path(__file__).with_name("faulty") / "comm/wan/transport.cpp"
    native = ctypes.CDLL(str(build([source], kind=Kind.library, flags=library._FLAGS[platform.machine()])))
    getattr(native, f"fault_{os.environ['WEFT_FAULT']}")(1)
