"""A stand-in for two training ranks of which always one computes: the bubbles of one are the work of the other."""

import sys
import time
from pathlib import Path

from weft.inference.board.writer import BoardWriter


def main(first: str, second: str, bubble_s: float) -> None:
    """Step for ever: the rank that writes ``first`` is idle, then the other one, and the same again."""
    one, other = (
        BoardWriter(Path(path), rank=rank, plan=[], max_edges=16) for rank, path in enumerate((first, second))
    )
    print("up", flush=True)
    while True:
        one.begin(1)
        other.begin(1)
        for _ in range(2):
            for idle, busy in ((one, other), (other, one)):
                busy.busy()
                idle.idle()
                time.sleep(bubble_s)
        one.busy()
        other.busy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
