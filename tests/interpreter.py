"""The one way in which tests run Python code or a module in a new process until it ends."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def python(*words: object, timeout_s: float = 110.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``words``, and return its exit code and output; ``options`` are `subprocess.run`'s."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
