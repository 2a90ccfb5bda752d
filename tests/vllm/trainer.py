"""A stand-in for a training rank: it sleeps through a step again and again, and marks it on a board."""

import sys
import time
from pathlib import Path

from weft.inference.board import BoardWriter


def main(path: str, bubble_s: float, work_s: float) -> None:
    """Step for ever: three bubbles, each followed by work."""
    writer = BoardWriter(Path(path), rank=0, plan=[], max_edges=16)
    print("up", flush=True)
    while True:
        writer.begin(1)
        for _ in range(3):
            time.sleep(bubble_s)
            writer.busy()
            time.sleep(work_s)
            writer.idle()
        writer.busy()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
