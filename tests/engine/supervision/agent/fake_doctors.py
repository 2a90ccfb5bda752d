"""Doctors in tests of examinations: what is forked in the place of the real one."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

WELL = {"check": "disk", "outcome": "passed", "text": "fine"}
ILL = {"check": "GEMM", "outcome": "failed", "text": "wrong bits"}


def finds_nothing(arguments: Sequence[str]) -> int:
    print(json.dumps([WELL]))
    return 0


def finds_something(arguments: Sequence[str]) -> int:
    print(json.dumps([WELL, ILL]))
    return 1


def dies(arguments: Sequence[str]) -> int:
    """Ends without a word."""
    os._exit(9)


def talks(arguments: Sequence[str]) -> int:
    """Says more than anybody wants to hear."""
    for _ in range(1 << 10):
        print("x" * (1 << 14))
    return 0


def hangs(arguments: Sequence[str]) -> int:
    """Does not end, and neither does what it has started, whose number it leaves in the run's folder."""
    child = subprocess.Popen(["sleep", "600"])
    Path(arguments[arguments.index("--folder") + 1], "child").write_text(str(child.pid))
    time.sleep(600)
    return 0
