"""A stand-in for a training rank: it sleeps through a step again and again, and marks it on a board.

Its bubbles grow with time: on a machine too busy for a chunk in the first ones, some later one is long enough.
"""

import sys
import time
from pathlib import Path

from weft.inference.board.writer import BoardWriter

CALM_S, DOUBLING_S = 60.0, 20.0
"""Seconds for which bubbles keep their length while servers start; afterwards they double at this interval."""


def main(path: str, bubble_s: float, work_s: float) -> None:
    """Step for ever: three bubbles, each followed by work; ``bubble_s`` at first."""
    writer = BoardWriter(Path(path), rank=0, plan=[], max_edges=16)
    print("up", flush=True)
    begin_s = time.monotonic()
    while True:
        age_s = time.monotonic() - begin_s
        writer.begin(1)
        for _ in range(3):
            time.sleep(bubble_s * 2 ** min(8.0, max(0.0, age_s - CALM_S) / DOUBLING_S))
            writer.busy()
            time.sleep(work_s)
            writer.idle()
        writer.busy()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
