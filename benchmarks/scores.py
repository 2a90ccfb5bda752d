"""Steps that need scores of a frozen model: in line, and ahead by workers that are well, slow, stopped or killed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.adapting.disturbance import real_time, timed_step
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork, pause
from benchmarks.peers.weft_engine import emulated_engine
from benchmarks.results import finish, parse, show
from benchmarks.serving.bubble_scorers import KEY, WORDS, serve_scores
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.models.batch import Batch
from weft.engine.scores import Ahead, InitialWeights, Score, StepScores
from weft.engine.scores.ahead import refuse_implausible, refuse_other_tokens
from weft.inference.board.layout import board_path
from weft.inference.worker.scorer import Scorer
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

LOSSES = ("dpo", "distill")
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
BAD = ("slow", *SIGNALS)
MODES = ("none", "in line", "ahead", *BAD)
"""``none`` trains without scores. The modes after ``in line`` are states of all workers."""
MOST = {"ahead": 1.0} | dict.fromkeys(BAD, 1.02)
"""Largest median step over that in line."""
OVERLOAD = 2.0
"""Work that slow workers receive over what fits into all bubbles."""
_RANKS, _MICROBATCHES, _TOKENS, _TOP_K = 4, 6, 256, 16
_STEPS_AHEAD, _UNCOUNTED = 4, 4


def main(argv: Sequence[str]) -> int:
    """Train by turns in all modes. Return 1 if steps with workers take longer than in line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scores", description=__doc__)
    parser.add_argument("--losses", nargs="+", default=LOSSES, metavar="NAME", help=f"of {', '.join(LOSSES)}")
    parser.add_argument("--layer", type=float, default=20.0, help="a layer's forward in ms, and each of its gradients")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=10, help=f"of a turn; the first {_UNCOUNTED} are not counted")
    args = parse(parser, argv, losses=LOSSES)
    if args.steps <= _UNCOUNTED:
        raise ValueError(f"--steps={args.steps}: the first {_UNCOUNTED} are not counted; give more")
    found = [mode for loss in args.losses for mode in _measure(loss, args)]
    cells = [
        mode
        | {"step ms": f"{mode['step ms']:.0f}", "ahead": f"{mode['ahead']:.0%}"}
        | {"/ in line": f"{median(mode['/ in line']):.3f}", "rounds": " ".join(map("{:.3f}".format, mode["/ in line"]))}
        for mode in found
    ]
    show(table_of(cells, "scores of a frozen model, emulated layers"))
    met = all(median(mode["/ in line"]) <= MOST.get(mode["workers"], inf) for mode in found)
    return finish(args, "scores", found, met=met)


def _measure(loss: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the median step of each mode, the ratios to that in line, and the share of scores that had arrived."""
    layer_s = args.layer / 1e3
    work = EmulatedWork(forward_s=layer_s, input_s=layer_s, weight_s=layer_s)
    case = EngineCase(num_ranks=_RANKS, num_layers=_RANKS, num_microbatches=_MICROBATCHES, work=work)
    bubbles_s = _RANKS * (_RANKS - 1) * 3 * layer_s  # of all ranks in a step of 1F1B
    usual_s = layer_s * (_RANKS if loss == "dpo" else 1)  # of a micro-batch: the whole model's, or a small teacher's
    with tempfile.TemporaryDirectory(prefix="weft-scores-") as folder, real_time(), ExitStack() as stack:
        config = WeftConfig()
        config.cluster.ranks = config.pipeline.stages = _RANKS
        config.pipeline.microbatches = _MICROBATCHES
        config.inference.enabled, config.inference.boards = True, folder
        workers = {
            mode: _start(stack, Path(folder), OVERLOAD * bubbles_s / _MICROBATCHES if mode == "slow" else usual_s)
            for mode in ("ahead", *BAD)
        }
        ranks = run_ranks(_RANKS, _train, case, config, loss, workers, args, timeout_s=1200.0)
    steps_s = {mode: np.array([rank[mode] for rank in ranks])[:, :, 0].max(0) for mode in MODES}
    return [
        {
            "loss": loss,
            "workers": mode,
            "step ms": 1e3 * float(np.median(steps_s[mode])),
            "/ in line": (steps_s[mode] / steps_s["in line"]).tolist(),
            "ahead": fmean(share for _, share in ranks[-1][mode]),
        }
        for mode in MODES
    ]


def _start(stack: ExitStack, boards: Path, score_s: float) -> tuple[int, list[str]]:
    """Start a worker for each rank's bubbles that needs ``score_s`` for a document. Return their process and URLs."""
    spawn = multiprocessing.get_context("spawn")
    own, other = spawn.Pipe()
    paths = [board_path(boards, rank) for rank in range(_RANKS)]
    process = spawn.Process(target=serve_scores, args=(other, paths, score_s), daemon=True)
    process.start()
    stack.callback(process.kill)
    return process.pid or 0, own.recv()


def _train(
    case: EngineCase,
    config: WeftConfig,
    loss: str,
    workers: Mapping[str, tuple[int, list[str]]],
    args: argparse.Namespace,
) -> Mapping[str, list[tuple[float, float]]]:
    """Return the median step of each turn of a mode, and the share of scores that had arrived. A collective call."""
    engine, batches = emulated_engine(case, config), _Batches()
    engine.set_dataiterator(batches)
    reference, teacher_s = InitialWeights(engine.sharding), 0.0
    for stage in engine.module.stages.values():
        stage.logits = stage.forward  # type: ignore[method-assign]  # of the reference

        def teach(_: Any, given: tuple[Any, Batch]) -> None:
            if teacher_s and "teacher" not in given[1]:
                pause(teacher_s)

        if stage.is_last:
            stage.register_forward_pre_hook(teach)
    found = {mode: list[tuple[float, float]]() for mode in MODES}
    for mode in MODES * args.rounds:
        teacher_s = args.layer / 1e3 if loss == "distill" and mode != "none" else 0.0
        alone = mode == "none" or (mode == "in line" and loss == "distill")  # there the stage has the teacher
        engine.scores = None if alone else _scores(engine, batches, workers.get(mode, (0, []))[1], reference, teacher_s)
        dist.barrier()
        steps = []
        for step in range(args.steps):
            if step == 1 and mode in SIGNALS and engine.holds_loss:
                os.kill(workers[mode][0], SIGNALS[mode])  # in the first turn while it computes
            steps.append((timed_step(engine), engine.scores.share_ahead if engine.scores else 0.0))
        seconds, shares = zip(*steps[_UNCOUNTED:], strict=True)
        found[mode].append((median(seconds), fmean(shares)))
        if engine.scores is not None:
            engine.scores.close()
    engine.scores = None
    engine.destroy()
    return found


def _scores(
    engine: WeftEngine, batches: _Batches, urls: Sequence[str], reference: InitialWeights, teacher_s: float
) -> StepScores:
    """Return what attaches scores to micro-batches: as the recipes' `open_scores`, for emulated layers."""
    distils, ahead = teacher_s > 0, None

    def taught(wanted: Sequence[Batch]) -> list[Tensor]:
        pause(teacher_s * len(wanted))
        return [torch.zeros(batch["labels"].shape) for batch in wanted]

    if urls and engine.holds_loss:
        workers = [Scorer(url, KEY, "model") for url in urls]
        likely = [partial(each.top_log_probs, top_k=_TOP_K, words=WORDS) for each in workers]
        check = partial(refuse_other_tokens, words=WORDS) if distils else refuse_implausible
        ahead = Ahead(likely if distils else [each.log_probs for each in workers], check=check)
    score = Score(
        "teacher" if distils else "reference",
        of_logits=lambda _, batch: torch.zeros(batch["labels"].shape),
        of_batches=taught if distils else None,
        of_tokens=lambda tokens, _: tokens,
    )
    steps_ahead = _STEPS_AHEAD if urls else 0
    return StepScores(engine, score, frozen=reference.active, ahead=ahead, peek=batches.peek, steps_ahead=steps_ahead)


class _Batches:
    """Micro-batches of one sequence of random tokens, which can be read ahead."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> dict[str, Tensor]:
        self._next += 1
        return self._batch(self._next - 1)

    def peek(self, count: int) -> list[dict[str, Tensor]]:
        return [self._batch(self._next + ahead) for ahead in range(count)]

    @staticmethod
    def _batch(number: int) -> dict[str, Tensor]:
        ids = torch.randint(WORDS, (1, _TOKENS), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(_TOKENS)[None]}
