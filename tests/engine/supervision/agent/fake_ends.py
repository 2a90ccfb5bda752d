"""Processes that end in every way there is, and leave work for the end; see test_ends.py."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path


class TakenApart:
    """The objects that the interpreter would destroy at its end."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __del__(self) -> None:
        self.trace.touch()


class Held:
    """The resources that are released at the end."""


KEPT: list[object] = []


def run(arguments: Sequence[str]) -> int:
    """Run ``FOLDER HOW``."""
    folder, how = Path(arguments[0]), arguments[1]
    os.dup2(1, 2)  # one answer has both

    def late() -> None:
        time.sleep(0.3)
        (folder / "thread").touch()

    held = Held()
    KEPT.extend([held, TakenApart(folder / "taken apart"), tempfile.TemporaryDirectory(dir=folder, prefix="temporary")])
    atexit.register((folder / "atexit").touch)
    weakref.finalize(held, (folder / "finalized").touch)
    threading.Thread(target=late).start()
    sys.stdout.write("no end of line")
    if how == "raises":
        raise RuntimeError("as it does")
    if how == "exits":
        sys.exit(3)
    if how == "exits with a word":
        sys.exit("the word")
    if how == "exits with nothing":
        sys.exit()
    return 5
