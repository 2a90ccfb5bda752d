"""Workers that emulate the scores of a model: each answers after some seconds within the bubbles of its rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from weft.inference.board.reader import BoardReader

KEY, WORDS = "secret", 200


def serve_scores(end: Any, boards: Sequence[Path], score_s: float) -> None:
    """Run a worker for each board until this process is killed, and send their URLs to ``end``."""
    worker = import_module("tests.inference.scorers").worker  # a peer only, which is not checked with Weft
    with ExitStack() as stack:
        end.send([stack.enter_context(worker(_BubbleModel(board, score_s)))[0] for board in boards])
        threading.Event().wait()


class _BubbleModel:
    """A model that finds all tokens equally likely, one document at a time."""

    def __init__(self, board: Path, score_s: float) -> None:
        self._board, self._score_s, self._device = BoardReader(board), score_s, threading.Lock()

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        with self._device:
            left_s = self._score_s
            while left_s > 0:
                state, begin_s = self._board.state(), monotonic()
                if state.bubble is None:
                    self._board.wait(state, 0.05)
                    continue
                sleep(max(0.0, min(left_s, state.bubble.closes_s - begin_s)))
                left_s -= monotonic() - begin_s
        return SimpleNamespace(logits=torch.zeros(*ids.shape, WORDS))
