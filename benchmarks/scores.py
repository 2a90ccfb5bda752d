"""Steps that need a reference's or a teacher's scores: in line, and ahead by workers that are well, slow or gone."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from math import log
from pathlib import Path
from statistics import fmean, median
from time import monotonic, sleep
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.adapting.disturbance import real_time, timed_step
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedStage, EmulatedWork, pause
from benchmarks.peers.weft_engine import emulated_facts, engine_of
from benchmarks.results import finish, parse, show
from weft.conf.schema import WeftConfig
from weft.engine.engine import WeftEngine
from weft.engine.models.batch import Batch
from weft.engine.planning.joining import join
from weft.engine.scores import Ahead, InitialWeights, Score, StepScores
from weft.engine.scores.ahead import refuse_implausible, refuse_other_tokens
from weft.inference.board.layout import board_path
from weft.inference.board.reader import BoardReader
from weft.inference.worker.proofs import HEADER, answer_proof, nonce_of
from weft.inference.worker.scorer import Scorer
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

LOSSES = ("dpo", "distill")
MODES = ("none", "in line", "ahead", "slow", "stopped", "killed", "nan")
"""``none`` trains without scores. The others after ``in line`` are states of all workers."""
OVERLOAD = 2.0
"""Work that slow workers receive over what fits into all bubbles."""
STEPS_AHEAD, TOP_K, WORDS = 4, 64, 1000
NOISE = 1.02
"""Largest step of a run with bad workers over that in line."""
_KEY, _RANKS, _UNCOUNTED = "secret", 4, 4


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Steps of a loss with workers in a state.

    Attributes:
        ratios: the step over that in line, of each round.
        ahead: share of micro-batches whose scores had arrived.
        more_bytes: resident memory of the last stage's rank after a turn, more than after a turn in line.
    """

    loss: str
    mode: str
    step_s: float
    ratios: tuple[float, ...]
    ahead: float
    more_bytes: float


class Turn(NamedTuple):
    """The median step of a rank, the share ahead, and the resident memory."""

    step_s: float
    ahead: float
    resident_bytes: int


def main(argv: Sequence[str]) -> int:
    """Train by turns with all modes. Return 1 if steps with bad workers take longer than in line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scores", description=__doc__)
    parser.add_argument("--losses", nargs="+", default=LOSSES, metavar="NAME", help=f"of {', '.join(LOSSES)}")
    parser.add_argument("--layer", type=float, default=20.0, help="a layer's forward in ms, and each of its gradients")
    parser.add_argument("--teacher", type=float, default=20.0, help="a teacher's forward in ms")
    parser.add_argument("--microbatches", type=int, default=6, help="of one sequence each")
    parser.add_argument("--tokens", type=int, default=512, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each mode")
    parser.add_argument("--steps", type=int, default=10, help=f"of a turn; the first {_UNCOUNTED} are not counted")
    args = parse(parser, argv, losses=LOSSES)
    found = [mode for loss in args.losses for mode in _measure(loss, args)]
    show(table_of(map(_cells, found), "scores of a frozen model, emulated layers"))
    bad = [mode for mode in found if mode.mode in MODES[MODES.index("ahead") + 1 :]]
    return finish(args, "scores", found, met=all(median(mode.ratios) <= NOISE for mode in bad))


def _cells(mode: Mode) -> Mapping[str, Any]:
    return {
        "loss": mode.loss,
        "workers": mode.mode,
        "step ms": f"{1e3 * mode.step_s:.0f}",
        "/ in line": f"{median(mode.ratios):.3f}",
        "rounds": " ".join(f"{ratio:.3f}" for ratio in mode.ratios),
        "ahead": f"{mode.ahead:.0%}",
        "more MB": f"{mode.more_bytes / 1e6:+.1f}",
    }


def _measure(loss: str, args: argparse.Namespace) -> list[Mode]:
    forward_s = args.layer / 1e3
    work = EmulatedWork(forward_s=forward_s, input_s=forward_s, weight_s=forward_s)
    case = EngineCase(num_ranks=_RANKS, num_layers=_RANKS, num_microbatches=args.microbatches, work=work)
    scored_s = _RANKS * forward_s if loss == "dpo" else args.teacher / 1e3
    bubbles_s = _RANKS * (_RANKS - 1) * 3 * forward_s  # of all ranks in a step of 1F1B
    slow_s = OVERLOAD * bubbles_s / args.microbatches
    with tempfile.TemporaryDirectory(prefix="weft-scores-") as folder:
        config = WeftConfig()
        config.cluster.ranks = config.pipeline.stages = _RANKS
        config.pipeline.microbatches = args.microbatches
        config.inference.enabled, config.inference.boards = True, folder
        with real_time(), _workers(Path(folder), scored_s, slow_s) as urls:
            ranks = run_ranks(_RANKS, _train, case, config, loss, urls, args, timeout_s=1200.0)
    steps_s = {
        mode: [max(turn.step_s for turn in turns) for turns in zip(*(rank[mode] for rank in ranks), strict=True)]
        for mode in MODES
    }
    usual, last = ranks[-1]["in line"], ranks[-1]
    return [
        Mode(
            loss=loss,
            mode=mode,
            step_s=median(steps_s[mode]),
            ratios=tuple(own / other for own, other in zip(steps_s[mode], steps_s["in line"], strict=True)),
            ahead=median(turn.ahead for turn in last[mode]),
            more_bytes=median(own.resident_bytes - u.resident_bytes for own, u in zip(last[mode], usual, strict=True)),
        )
        for mode in MODES
    ]


def _train(
    case: EngineCase, config: WeftConfig, loss: str, urls: Sequence[str], args: argparse.Namespace
) -> Mapping[str, list[Turn]]:
    device, batches = join(config), _Batches(args.tokens)
    teacher_s = args.teacher / 1e3 if loss == "distill" else 0.0
    engine = engine_of(
        config,
        emulated_facts(case, config, device),
        device,
        lambda run, index: _Stage(case.work, teacher_s, index=index, layers=run.plan.split.layers),
        batches,
    )
    reference, found = InitialWeights(engine.sharding), {mode: list[Turn]() for mode in MODES}
    for mode in MODES * args.rounds:
        for stage in engine.module.stages.values():
            stage.teacher_s = 0.0 if mode == "none" else teacher_s
        alone = mode == "none" or (mode == "in line" and loss == "distill")  # there the stage has the teacher
        engine.scores = None if alone else _scores(engine, batches, loss, mode, urls, reference)
        dist.barrier()
        steps = [(timed_step(engine), _share(engine)) for _ in range(args.steps)][_UNCOUNTED:]
        seconds, shares = zip(*steps, strict=True)
        found[mode].append(Turn(median(seconds), fmean(shares), psutil.Process().memory_info().rss))
        if engine.scores is not None:
            engine.scores.close()
    engine.scores = None
    engine.destroy()
    return found


def _share(engine: WeftEngine) -> float:
    return 0.0 if engine.scores is None else engine.scores.share_ahead


def _scores(
    engine: WeftEngine, batches: _Batches, loss: str, mode: str, urls: Sequence[str], reference: InitialWeights
) -> StepScores:
    ahead, distils = None, loss == "distill"
    if mode != "in line" and engine.holds_loss:
        # Port 9, discard, on which nothing listens, refuses connections as a worker that was killed.
        workers = [Scorer("http://127.0.0.1:9" if mode == "killed" else url, _KEY, mode) for url in urls]
        scorers: list[Callable] = [
            partial(each.top_log_probs, top_k=TOP_K, words=WORDS) if distils else each.log_probs for each in workers
        ]
        ahead = Ahead(scorers, check=partial(refuse_other_tokens, words=WORDS) if distils else refuse_implausible)
    return StepScores(
        engine,
        Score(
            "teacher" if distils else "reference",
            of_logits=lambda _, batch: torch.zeros(batch["labels"].shape),
            of_batches=partial(_taught, engine) if distils else None,
            of_tokens=lambda tokens, _: tokens,
        ),
        frozen=reference.active,
        ahead=ahead,
        peek=batches.peek,
        steps_ahead=0 if mode == "in line" else STEPS_AHEAD,
    )


def _taught(engine: WeftEngine, batches: Sequence[Batch]) -> list[Tensor]:
    """Return scores after the seconds of a teacher's forwards."""
    stage = engine.module.stages[_RANKS - 1]
    pause(stage.teacher_s * len(batches))
    return [torch.zeros(batch["labels"].shape) for batch in batches]


class _Stage(EmulatedStage):
    """A stage whose last one computes a teacher's forward for micro-batches without its scores."""

    def __init__(self, work: EmulatedWork, teacher_s: float, **given: Any) -> None:
        super().__init__(work, **given)
        self.teacher_s = teacher_s

    def forward(self, hidden: Tensor | None, batch: Batch, num_items: Tensor | None = None) -> Tensor:
        if self.is_last and self.teacher_s and "teacher" not in batch:
            pause(self.teacher_s)
        return super().forward(hidden, batch, num_items)

    def logits(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        assert hidden is not None
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class _Batches(Iterator[Batch]):
    """Micro-batches of one sequence of random tokens, which can be read ahead."""

    def __init__(self, tokens: int) -> None:
        self._source = self._generate(tokens)
        self._peeked: deque[Batch] = deque()

    def __next__(self) -> Batch:
        return self._peeked.popleft() if self._peeked else next(self._source)

    def peek(self, count: int) -> Sequence[Batch]:
        self._peeked.extend(islice(self._source, max(0, count - len(self._peeked))))
        return list(islice(self._peeked, count))

    @staticmethod
    def _generate(tokens: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(0)
        while True:
            ids = torch.randint(WORDS, (1, tokens), generator=generator)
            yield {"input_ids": ids, "labels": ids, "position_ids": torch.arange(tokens)[None]}


@contextmanager
def _workers(boards: Path, scored_s: float, slow_s: float) -> Iterator[list[str]]:
    spawn = multiprocessing.get_context("spawn")
    ends = [spawn.Pipe() for _ in range(_RANKS)]
    processes = [
        spawn.Process(target=_serve, args=(end, board_path(boards, rank), scored_s, slow_s), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    try:
        yield [f"http://127.0.0.1:{own.recv()}" for own, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(end: Any, board: Path, scored_s: float, slow_s: float) -> None:
    """Serve scores, each after some seconds within bubbles of a rank. The model's name is the worker's state."""
    reader, device = BoardReader(board), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["content-length"]))
            value = json.loads(request)
            if value["model"] == "stopped":
                sleep(3600.0)
            with device:
                _compute(reader, slow_s if value["model"] == "slow" else scored_s)
            body = _answer(value).tobytes()
            nonce = nonce_of(_KEY.encode(), self.headers["authorization"].partition(" ")[2].encode())
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header(HEADER, answer_proof(_KEY.encode(), nonce or "", request, body))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    end.send(server.server_port)
    server.serve_forever()


def _compute(board: BoardReader, seconds: float) -> None:
    """Return after ``seconds`` within bubbles."""
    while seconds > 0:
        state, begin_s = board.state(), monotonic()
        if state.bubble is None:
            board.wait(state, 0.05)
            continue
        sleep(max(0.0, min(seconds, state.bubble.closes_s - begin_s)))
        seconds -= monotonic() - begin_s


def _answer(value: Mapping[str, Any]) -> np.ndarray:
    count = max(1, value["top_k"])
    found = np.zeros((len(value["prompt"]), count, 2), "<f4")
    found[:, :, 0] = range(count) if value["top_k"] else np.array(value["prompt"])[:, None]
    found[:, :, 1] = np.nan if value["model"] == "nan" else -log(count + 1)
    return found
