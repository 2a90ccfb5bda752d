"""Tensor parallelism on two ranks, compared with transformers' and DeepSpeed's: losses, bytes, time."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.netbed.ranks import run_ranks_in
from benchmarks.results import show
from weft.conf.schema import (
    ClusterConfig,
    CommConfig,
    LrSchedule,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    SiteConfig,
    TrainConfig,
    WeftConfig,
)
from weft.engine.stages.files.loading import build_model
from weft.tools.netbed import NetBed, Topology
from weft.tools.tables import table_of

TIMEOUT_S = 300.0
TOLERANCE = 1e-4
"""Largest relative difference of losses and norms from one process that counts as equal."""
MORE = 1.05
"""Bytes over a hop of two members, over those of one rank, that count as the same: messages have heads."""
BETAS = (0.9, 0.95)
SHAPE = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}


@dataclass(frozen=True)
class TrainingCase:
    """The settings of the training.

    Attributes:
        folder: folder of the saved model, which all engines load.
        steps: number of training steps, the first of which is not timed.
    """

    folder: str
    microbatches: int
    rows: int
    length: int
    vocabulary: int
    steps: int
    rate: float = 1e-3
    clip: float = 0.5

    def step(self, number: int) -> list[dict[str, Tensor]]:
        """Return the micro-batches of a step; the labels are all of their tokens."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.microbatches, self.rows, self.length)
        return [{"input_ids": ids, "labels": ids} for ids in torch.randint(self.vocabulary, shape, generator=generator)]


@dataclass(frozen=True)
class TrainingRun:
    """The result of an engine's rank, or the reason why the engine could not run.

    Attributes:
        losses: loss of each step.
        norms: norm of each step's gradient before clipping; NaN if the engine does not report it.
        step_s: median seconds of a step.
        step_bytes: bytes that left this rank's node in a step.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: float = 0.0
    step_bytes: float = 0.0
    failure: str = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the race and of the hops."""
    parser.add_argument("--race", nargs="+", metavar="ARCH", help="instead: time of two ranks, beside other engines")
    parser.add_argument(
        "--hops", metavar="ARCH", help="instead: bytes between two sites, of one rank a stage and of two"
    )
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), help=", ".join(ENGINES))
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the race")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence in the race")
    parser.add_argument("--microbatches", type=int, default=3, help="of a step of the race, two sequences each")
    parser.add_argument("--rate", type=float, default=1000, help="link between the two ranks, Mbit/s")
    parser.add_argument("--latency", type=float, default=0.2, help="one-way delay between them in ms")


def race(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Race all engines on each architecture; return the runs, and True if Weft's losses equal those of one process."""
    met, figures = True, []
    for arch in args.race:
        with TemporaryDirectory(prefix="weft-bench-tensor-") as folder:
            found = _race(arch, args, folder)
        figures.append({"arch": arch, **found})
        met = _show(arch, found, args) and met
    return figures, met


def _race(arch: str, args: argparse.Namespace, folder: str) -> dict[str, TrainingRun]:
    """Return the run of each engine's first rank, beginning with one process of plain transformers."""
    case = _case(arch, args, folder)
    topology = Topology.even((1, 1), uplink_mbps=args.rate, latency_ms=args.latency)
    found = {}
    with NetBed.up(topology) as bed:
        for name in ("one process", *args.engines):
            nodes = ("n0",) if name == "one process" else ("n0", "n1")
            runs = run_ranks_in(bed, nodes, _attempt, name, case, timeout_s=TIMEOUT_S)
            found[name] = next((run for run in runs if run.failure), runs[0])
    return found


def _case(arch: str, args: argparse.Namespace, folder: str) -> TrainingCase:
    """Save a model to a folder, and return the settings of its training."""
    vocabulary = 4096
    shape = SHAPE | {"hidden_size": args.hidden, "intermediate_size": 3 * args.hidden, "vocab_size": vocabulary}
    config = ModelConfig(arch=arch, overrides={**shape, "head_dim": args.hidden // 8}, self_check=False)
    build_model(config, dtype=torch.float32, seed=1).save_pretrained(folder)
    return TrainingCase(folder, args.microbatches, 2, args.length, vocabulary, args.steps)


def hops(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Return the bytes that leave each of two sites in a step, and True if members send no more than one rank does."""
    topology = Topology.even((1, 1), uplink_mbps=args.rate, latency_ms=args.latency)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory(prefix="weft-bench-tensor-") as folder, NetBed.up(topology) as bed:
        case = _case(args.hops, args, folder)
        activations = case.microbatches * case.rows * case.length * args.hidden * 4
        for members in (1, 2):
            nodes = ["n0"] * members + ["n1"] * members
            runs = run_ranks_in(bed, nodes, over_sites, case, members, timeout_s=TIMEOUT_S)
            there, back = runs[0].step_bytes, runs[-1].step_bytes
            rows.append({"parallel.tensor": members, "there": there, "back": back, "activations": activations})
    first, second = rows
    ratio = (second["there"] + second["back"]) / (first["there"] + first["back"])
    show(table_of(rows, f"{args.hops}, two sites, bytes over the hop in a step"), f"ratio {ratio:.4f}")
    return rows, ratio < MORE


def _attempt(name: str, case: TrainingCase) -> TrainingRun:
    torch.set_num_threads(1)
    try:
        return {"one process": one_process, **ENGINES}[name](case)
    except Exception as error:  # any: what an engine does not support is a result
        if name == "Weft":
            raise
        return TrainingRun(failure=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _timed(case: TrainingCase, train: Callable[[list[dict[str, Tensor]]], tuple[float, float]]) -> TrainingRun:
    """Train with a function that maps a step's micro-batches to its loss and gradient norm."""
    found, seconds, sent = [], [], []
    for number in range(case.steps):
        before, start = _sent(), perf_counter()
        found.append(train(case.step(number)))
        seconds.append(perf_counter() - start)
        sent.append(_sent() - before)
    losses, norms = zip(*found, strict=True)
    return TrainingRun([*losses], [*norms], median(seconds[1:]), median(sent[1:]))


def _sent() -> int:
    """Return the number of bytes that have left this rank's node."""
    return sum(card.bytes_sent for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo")


def one_process(case: TrainingCase) -> TrainingRun:
    """Train with plain transformers and torch's AdamW."""
    from transformers import AutoModelForCausalLM

    return _trained(case, AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32))


def transformers_own(case: TrainingCase) -> TrainingRun:
    """Train with transformers' own tensor parallelism, like `one_process` otherwise."""
    from transformers import AutoModelForCausalLM

    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, tp_plan="auto")
    return _trained(case, model)


def _trained(case: TrainingCase, model: torch.nn.Module) -> TrainingRun:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.rate, betas=BETAS, weight_decay=0.0, foreach=False)

    def train(batches: list[dict[str, Tensor]]) -> tuple[float, float]:
        total = 0.0
        for batch in batches:
            loss = model(**batch, use_cache=False).loss / len(batches)
            loss.backward()
            total += float(loss.detach())
        norm = _clip([p.grad for p in model.parameters() if p.grad is not None], case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return _timed(case, train)


def _clip(gradients: Sequence[Tensor], limit: float) -> float:
    """Clip gradients to the norm ``limit`` like torch, and return their norm before.

    Some gradients are DTensors and others plain tensors. torch's own function does not accept both together.
    """
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    sharded, whole = torch.zeros(()), torch.zeros(())
    for gradient, part in zip(gradients, local, strict=True):
        is_part = isinstance(gradient, DTensor) and any(place.is_shard() for place in gradient.placements)
        (sharded if is_part else whole).add_(part.square().sum())
    if dist.is_initialized():
        dist.all_reduce(sharded)
    norm = float((sharded + whole).sqrt())
    for part in local:
        part.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def deepspeed_autotp(case: TrainingCase) -> TrainingRun:
    """Train with DeepSpeed's AutoTP."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    from weft.engine.distributed import leave_out_shm_operator

    leave_out_shm_operator()
    deepspeed.init_distributed("gloo")
    model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32).train()
    settings = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.microbatches,
        "gradient_clipping": case.clip,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": case.rate, "betas": BETAS, "weight_decay": 0.0, "torch_adam": True},
        },
        "tensor_parallel": {"autotp_size": dist.get_world_size()},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=settings)

    def train(batches: list[dict[str, Tensor]]) -> tuple[float, float]:
        total = 0.0
        for batch in batches:
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        return total, float(engine.get_global_grad_norm() or nan)

    return _timed(case, train)


def weft(case: TrainingCase) -> TrainingRun:
    """Train with Weft and ``parallel.tensor=2``."""
    return _weft(case, ParallelConfig(tensor=int(os.environ["WORLD_SIZE"]), tensor_across_hosts=True), ())


def over_sites(case: TrainingCase, tensor: int) -> TrainingRun:
    """Train with Weft and a stage of ``tensor`` members at each of two sites."""
    torch.set_num_threads(1)
    return _weft(case, ParallelConfig(tensor=tensor), ("n0", "n1"))


def _weft(case: TrainingCase, parallel: ParallelConfig, sites: Sequence[str]) -> TrainingRun:
    from weft.engine.initialize import initialize

    config = WeftConfig(
        model=ModelConfig(path=case.folder, self_check=False),
        cluster=ClusterConfig(sites=[SiteConfig(name=name, ranks=1) for name in sites]),
        comm=CommConfig(connections=4),  # bytes are counted, so the link needs no probe
        pipeline=PipelineConfig(stages=max(1, len(sites)), microbatches=case.microbatches),
        parallel=parallel,
        optimizer=OptimizerConfig(
            lr=case.rate, betas=list(BETAS), weight_decay=0.0, clip=case.clip, schedule=LrSchedule.constant
        ),
        train=TrainConfig(microbatch_size=case.rows, steps=case.steps),
    )
    config.data.sequence_length = case.length
    engine, *_ = initialize(config=config)

    def train(batches: list[dict[str, Tensor]]) -> tuple[float, float]:
        loss = float(engine.train_batch(_iterator(batches)))
        return loss, float(engine.get_global_grad_norm() or nan)

    run = _timed(case, train)
    dist.barrier()
    engine.destroy()
    return run


def _iterator(batches: Sequence[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    yield from batches


ENGINES: Mapping[str, Callable[[TrainingCase], TrainingRun]] = {
    "Weft": weft,
    "transformers": transformers_own,
    "DeepSpeed": deepspeed_autotp,
}


def _off(found: Sequence[float], alone: Sequence[float]) -> float:
    return max(abs(mine - theirs) / theirs for mine, theirs in zip(found, alone, strict=True))


def _show(arch: str, found: Mapping[str, TrainingRun], args: argparse.Namespace) -> bool:
    """Print the table; return True if Weft's losses equal those of one process."""
    alone, ours = found["one process"], found.get("Weft")

    def rows() -> Iterator[dict[str, object]]:
        for name in args.engines:
            run = found[name]
            if run.failure:
                yield {"engine": name, "losses off by": f"does not run: {run.failure}"}
                continue
            yield {
                "engine": name,
                "losses off by": f"{_off(run.losses, alone.losses):.1e}",
                "norms": f"{_off(run.norms, alone.norms):.1e}".replace("nan", "not told"),
                "MB a step": f"{run.step_bytes / 1e6:.2f}",
                "ms a step": f"{1e3 * run.step_s:.0f}",
                "of Weft's time": f"{run.step_s / ours.step_s:.2f}" if ours else "-",
            }

    title = f"{arch}, two ranks, {args.microbatches} micro-batches, {args.rate:g} Mbit/s, {args.latency:g} ms"
    show(table_of(rows(), title))
    return ours is None or max(_off(ours.losses, alone.losses), _off(ours.norms, alone.norms)) <= TOLERANCE
