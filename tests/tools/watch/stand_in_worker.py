"""A stand-in for the prefill worker of rank 1: the gate grants its chunks, through which it sleeps."""

import json
import sys
import time
from pathlib import Path

from weft.inference.board.layout import board_path
from weft.inference.board.reader import BoardReader
from weft.inference.placement.prefill_cost import PrefillCost
from weft.inference.worker.chunk_recorder import ChunkRecorder
from weft.inference.worker.gate import Gate

RANK, MOST_TOKENS, TOKEN_S = 1, 64, 1e-5


def main(boards: Path, rings: str, log: Path) -> None:
    """Compute for ever, and log each chunk: tokens, start and end."""
    gate = Gate([BoardReader(board_path(boards, RANK))], PrefillCost(), guard_s=1e-4)
    recorder = ChunkRecorder(rings, [RANK], 1)
    with log.open("w", buffering=1) as out:
        while True:
            tokens, _ = gate.grant(MOST_TOKENS, 0)
            if not tokens:
                time.sleep(2e-4)
                continue
            start_s = time.monotonic()
            time.sleep(tokens * TOKEN_S)
            end_s = time.monotonic()
            gate.ended(start_s, end_s, tokens, 0)
            recorder.add(tokens, [(start_s, end_s, None)])
            out.write(json.dumps([tokens, start_s, end_s]) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
