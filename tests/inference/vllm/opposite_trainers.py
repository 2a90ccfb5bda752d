"""A stand-in for training ranks of which one is idle at a time: no two bubbles overlap."""

import sys
import time
from pathlib import Path

from weft.inference.board.writer import BoardWriter


def main(bubble_s: float, *paths: str) -> None:
    """Step for ever: each rank is idle in turn, and all of them twice."""
    ranks = [BoardWriter(Path(path), rank=rank, plan=[], max_edges=16) for rank, path in enumerate(paths)]
    print("up", flush=True)
    while True:
        for rank in ranks:
            rank.begin(1)
            rank.busy()
        for idle in ranks * 2:
            idle.idle()
            time.sleep(bubble_s)
            idle.busy()


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
