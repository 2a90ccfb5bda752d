"""Memory of a rank by layout, predicted and measured."""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.results import finish, parse, show
from weft.conf.compose import compose
from weft.conf.schema import LoraConfig, WeftConfig
from weft.engine.execution import neighbours
from weft.engine.planning import gathering
from weft.engine.stages.files.loading import build_model
from weft.pipeline.costs import LinkCost
from weft.recipes.emulation.tensor_peak import TensorPeak
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

TIMEOUT_S = 280
BYTES_PER_S = 5e7
"""Bandwidth of memory that plans assume."""
NUM_RANKS = 4
VOCABULARY = 4096
QUICKSTART = ("recipe=quickstart", f"model.overrides.vocab_size={VOCABULARY}", "model.self_check=false")
WORDS, WIDTH, TOKENS = 131_072, 512, 1024
"""Sizes of a head and of its input, whose logits take most of the memory."""
_MANY_TOKENS = f"model.overrides.vocab_size={WORDS}"
_SPLIT = ("pipeline.stages=2", "pipeline.schedule=zbv", "pipeline.placement=fold", "parallel.tensor=2", _MANY_TOKENS)
"""Input and weight gradients apart, with the last stage on the first rank."""
LAYOUTS = (
    ("pipeline.stages=4",),
    ("pipeline.stages=2", "zero.stage=1"),
    ("pipeline.stages=2", "pipeline.schedule=w", "zero.stage=1"),
    ("pipeline.stages=1", "pipeline.recompute=layers"),
    ("pipeline.stages=1", "pipeline.recompute=elementwise"),
    ("pipeline.stages=2", "pipeline.schedule=w", "pipeline.recompute=elementwise"),
    ("pipeline.stages=4", _MANY_TOKENS),
    _SPLIT,
    (*_SPLIT, "model.chunked_loss=always", "model.loss_chunk_mb=32"),
    ("pipeline.stages=1", "parallel.tensor=4", "model.overrides.num_key_value_heads=4", _MANY_TOKENS),
)
"""Departures from the quickstart, each on four ranks."""
_FOUR_BITS = ("model.lora.enabled=true", "model.lora.target_modules=[all-linear]", "model.lora.quantize=nf4")
QLORA = (
    ("pipeline.stages=2", "pipeline.schedule=zbv", "pipeline.placement=fold", *_FOUR_BITS),
    ("pipeline.stages=4", *_FOUR_BITS),
    ("pipeline.stages=2", "pipeline.schedule=1f1b", "zero.stage=1", *_FOUR_BITS),
)
"""Adapters over base weights of 4 bits. Needs bitsandbytes."""
_RECIPE = "model.overrides.vocab_size=8192"
EMULATED = (
    ("pipeline.stages=4", _RECIPE),
    ("pipeline.stages=2", "zero.stage=1", _RECIPE),
    ("pipeline.stages=2", "pipeline.schedule=w", "zero.stage=3", _RECIPE),
)
"""Layouts that are emulated as well, with the recipe's tokens."""
LAST_STAGE = (
    _MANY_TOKENS,
    f"model.overrides.hidden_size={WIDTH}",
    f"model.overrides.intermediate_size={2 * WIDTH}",
    "model.overrides.num_hidden_layers=4",
    f"model.overrides.max_position_embeddings={TOKENS}",
    f"data.sequence_length={TOKENS}",
    "optimizer.kind=sgd",
    "optimizer.betas=[0.0,0.0]",
    "train.microbatch_size=1",
    "pipeline.stages=2",
    "pipeline.microbatches=2",
    "pipeline.placement=fold",
    "pipeline.schedule=zbv",
    "comm.timeout_s=300",
)
"""ZB-V splits backwards, and the first rank holds the last stage. SGD has no state."""
_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """Peak bytes of a rank in one layout.

    Attributes:
        predicted: bytes predicted by the plan.
        measured: peak bytes of tensors, including set-up, by the profiler.
        step_s: processor time of the last step.
    """

    layout: str
    rank: int
    predicted: float
    measured: float
    step_s: float

    @property
    def error(self) -> float:
        """The error of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1


def peaks(
    timeout_s: float,
    settings: Callable[[WeftConfig], WeftConfig] = lambda config: config,
    layouts: Sequence[Sequence[str]] = LAYOUTS,
) -> Iterator[list[RankPeak]]:
    """Yield the peaks of all ranks for each layout, measured in new processes."""
    for layout in layouts:
        config = settings(compose([*QUICKSTART, *layout]))
        with tempfile.TemporaryDirectory() as folder:
            if config.model.lora.enabled:
                config = _on_base(config, folder)
            yield run_ranks(NUM_RANKS, layout_peak, " ".join(layout), config, timeout_s=timeout_s)


def _on_base(config: WeftConfig, folder: str) -> WeftConfig:
    """Return a configuration whose base model is the quickstart's new one, saved to ``folder``.

    Each tensor has a file, because the profiler counts a mapped file as long as one of its tensors exists.
    """
    new = replace(config.model, lora=LoraConfig())
    build_model(new, dtype=torch.float32, seed=0).save_pretrained(folder, max_shard_size=1)
    return replace(config, model=replace(config.model, path=folder, overrides={}))


def known_bandwidth() -> AbstractContextManager[object]:
    """Return the context in which memory's bandwidth is not measured by a copy, which takes more than a step."""
    return patch.object(gathering, "usable_memory", lambda *_: BYTES_PER_S)


@contextmanager
def recorded_tensors() -> Iterator[None]:
    """Context in which the record of tensors has those of steps alone, and all of them.

    Channels have no shared memory, which it misses.
    """
    with patch.object(neighbours, "share", lambda hops, **_: ({}, hops)), known_bandwidth():
        yield


def layout_peak(layout: str, config: WeftConfig) -> RankPeak:
    """Return this rank's peak in a layout of the quickstart. A collective call."""
    from weft.engine.initialize import initialize

    with recorded_tensors():
        peak = TensorPeak()
        engine, *_ = initialize(config=config)
        engine.set_dataiterator(random_batches(config))
        for _ in range(_STEPS):
            began = process_time()
            engine.train_batch()
        step_s = process_time() - began
        predicted = engine.plan.memory[engine.pipe_rank].total
        engine.destroy()
        del engine
        gc.collect()
        measured = peak.stop()
    return RankPeak(layout=layout, rank=dist.get_rank(), predicted=predicted, measured=measured, step_s=step_s)


def random_batches(config: WeftConfig) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of random tokens without end."""
    generator = torch.Generator().manual_seed(0)
    size = config.train.microbatch_size, config.data.sequence_length
    while True:
        ids = torch.randint(VOCABULARY, size, generator=generator)
        yield {"input_ids": ids, "labels": ids}


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--emulated", action="store_true", help="of emulated and of real runs")
    kinds.add_argument("--loss", action="store_true", help="of a loss over 128k words, also in peers; and its time")
    args = parse(parser, argv)
    quickstart = "peak of tensors on a rank of the quickstart, 4 ranks"
    parts = {quickstart: layout_rows}
    if args.emulated:
        parts = {f"{quickstart}, real and emulated": emulated_rows}
    if args.loss:
        head = f"forward and backward of a head, {WORDS:,} words, {TOKENS} tokens, width {WIDTH}, fp32"
        parts = {head: head_rows, "rank of the last stage under ZB-V, a Llama of 4 layers, 2 stages": stage_rows}
    tables = [table_of(rows(), title) for title, rows in parts.items()]
    show(*tables)
    return finish(args, "memory", tables)


def layout_rows() -> Iterator[dict[str, object]]:
    """Yield a row for each of the quickstart's layouts, about the rank with the worst prediction."""
    for found in peaks(TIMEOUT_S, layouts=(*LAYOUTS, *QLORA)):
        worst = max(found, key=lambda rank: abs(rank.error))
        yield memory_row(worst.layout, worst.predicted, worst.measured, rank=worst.rank)


def emulated_rows() -> Iterator[dict[str, object]]:
    """Yield a row for each pipeline rank of some layouts: its peak in a real and in an emulated run."""
    from weft.recipes.emulation.job import recipe_job
    from weft.recipes.emulation.session import Setting
    from weft.recipes.emulation.turns import emulate
    from weft.recipes.emulation.what_if import WhatIf

    link = LinkCost(latency_s=1e-4, bandwidth_bps=1e10)
    setting = Setting(delays="simulate", per_host=NUM_RANKS, inside=link, between=link, what_if=WhatIf())
    for layout in EMULATED:
        config = compose([*QUICKSTART, *layout, f"cluster.ranks={NUM_RANKS}"])
        name = " ".join(layout[:-1])
        real = run_ranks(NUM_RANKS, layout_peak, name, config, timeout_s=TIMEOUT_S)
        with tempfile.TemporaryDirectory() as folder:
            turns = emulate(recipe_job(config, Path(folder)), NUM_RANKS, setting, steps=1).turns
        for turn in turns:
            measured = real[turn.rank].measured
            yield {
                "layout": name,
                "rank": turn.rank,
                "real MB": f"{measured / 1e6:.1f}",
                "emulated": f"{turn.peak_bytes / measured - 1:+.2%}",
                "planned": f"{turn.planned_bytes / measured - 1:+.2%}",
            }


def head_rows() -> Iterator[dict[str, object]]:
    """Yield a row for each loss that runs without compilation: its peak and its processor time."""
    from benchmarks.blocks.kernels import losses
    from benchmarks.blocks.llama import Shape, Variant

    shape = Shape(width=WIDTH, inner=2 * WIDTH, heads=4, groups=2, words=WORDS)
    base_s = base = 0.0
    for each in losses(shape, TOKENS, torch.device("cpu"), torch.float32):
        if each.needs != Variant():
            continue
        with each.passes() as passes:
            inputs = passes.prepare()
            began, peak = process_time(), TensorPeak()
            loss = passes.backward(passes.forward(inputs))["0"].item()
            seconds, peak_bytes = process_time() - began, peak.stop()
        base_s, base = base_s or seconds, base or loss
        yield {
            "loss": each.name,
            "peak MB": f"{peak_bytes / 1e6:.0f}",
            "processor time / first": f"{seconds / base_s:.2f}",
            "difference of the loss": f"{abs(loss / base - 1):.0e}",
        }


def stage_rows() -> Iterator[dict[str, object]]:
    """Yield a row for whole logits and for chunks, with 1 and 2 tensor ranks."""
    for tensor in (1, 2):
        base_s = 0.0
        for chunked in ("never", "always"):
            settings = (*LAST_STAGE, f"parallel.tensor={tensor}", f"model.chunked_loss={chunked}")
            config = compose([*QUICKSTART, *settings])
            found = run_ranks(2 * tensor, layout_peak, chunked, config, timeout_s=2 * TIMEOUT_S)[0]
            base_s = base_s or found.step_s
            logits = "whole" if chunked == "never" else f"chunks of {config.model.loss_chunk_mb:g} MB"
            yield {
                **memory_row(logits, found.predicted, found.measured, tensor=tensor),
                "processor time / whole": f"{found.step_s / base_s:.2f}",
            }


def memory_row(layout: str, predicted: float, measured: float, **where: object) -> dict[str, object]:
    """Return the cells of a layout's peak in bytes, with further cells behind its name."""
    return {
        "layout": layout,
        **where,
        "predicted MB": f"{predicted / 1e6:.1f}",
        "measured MB": f"{measured / 1e6:.1f}",
        "error": f"{predicted / measured - 1:+.1%}",
    }
