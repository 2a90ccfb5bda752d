"""A command that holds a temporary folder until it is ended."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(dir=argv[0]) as folder:
        print(folder, flush=True)
        time.sleep(60)
    return 0
