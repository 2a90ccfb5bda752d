"""Loss over a large vocabulary: memory and time in chunks, of whole logits, and of DeepSpeed's and torch's losses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import RankPeak, layout_peak, most_allocated
from benchmarks.results import at_once, finish, parse, show
from weft.conf.schema import ModelConfig
from weft.engine.backward.products import multiply
from weft.engine.models.head_loss import HeadLoss
from weft.engine.parallel.axis import Alone
from weft.tools.ranks import run_ranks
from weft.tools.tables import table_of

WORDS, TOKENS, WIDTH = 131_072, 1024, 512
CHUNK_MB = ModelConfig.loss_chunk_mb
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STAGE = (
    f"model.overrides.vocab_size={WORDS}",
    f"model.overrides.hidden_size={WIDTH}",
    "model.overrides.intermediate_size=1024",
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
"""A small Llama with many tokens. ZB-V splits backwards, and the first rank holds the last stage. SGD has no state."""
TIMEOUT_S = 580

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the sum of the losses of hidden states [tokens, H], the head's weight [V, H] and labels [tokens]."""


def _whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def _weft(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    product = HeadLoss(
        weight=weight,
        bias=None,
        labels=labels,
        ignore_index=-100,
        steps=(),
        chunk_bytes=CHUNK_MB * 1e6,
        group=Alone("tensor"),
        differentiable=True,
        complete=nullcontext,
    )
    return multiply(hidden, product).sum()


def _deepspeed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # torch 2.13 has both, and 2.11 neither.
    compute, options = getattr(F, "linear_cross_entropy"), getattr(torch.nn, "LinearCrossEntropyOptions")  # noqa: B009
    loss: Tensor = compute(hidden, weight, labels, reduction="sum", options=options())
    return loss


HEADS: dict[str, Head] = {"whole logits": _whole, "Weft": _weft, "DeepSpeed chunked_cross_entropy": _deepspeed} | (
    {"torch linear_cross_entropy": _torch} if hasattr(F, "linear_cross_entropy") else {}
)


def head_rows(dtype: str, rounds: int) -> Iterator[dict[str, object]]:
    """Yield a row of peak memory and processor time for each head. The heads take turns."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).to(DTYPES[dtype]).requires_grad_()
    weight = nn.Parameter((torch.randn(WORDS, WIDTH) * WIDTH**-0.5).to(DTYPES[dtype]))
    labels = torch.randint(WORDS, (TOKENS,))
    with torch.no_grad():
        exact = float(_weft(hidden.float(), weight.float(), labels))
    peaks, errors = {}, {}
    times: dict[str, list[float]] = {name: [] for name in HEADS}
    for name in [*HEADS] * rounds:
        began = process_time()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            errors[name] = _train(HEADS[name], hidden, weight, labels) / exact - 1
            hidden.grad = weight.grad = None
        times[name].append(process_time() - began)
        peaks[name] = most_allocated(profiled)
    base = median(times["whole logits"])
    for name in HEADS:
        yield {
            "dtype": dtype,
            "loss": name,
            "peak MB": f"{peaks[name] / 1e6:.0f}",
            "processor time / whole": f"{median(times[name]) / base:.2f}",
            "error of the loss": f"{abs(errors[name]):.1e}",
        }


def _train(head: Head, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    loss = head(hidden, weight, labels) / TOKENS
    loss.backward()
    return float(loss.detach()) * TOKENS


def stage_rows(dtype: str, _: int) -> Iterator[dict[str, object]]:
    """Yield rows for the rank of the last stage, with whole logits and with chunks, on 1 and 2 tensor ranks."""
    base = 0.0
    for tensor, chunks in product((1, 2), (False, True)):
        found = _last_stage(dtype, tensor, "always" if chunks else "never")
        base = base if chunks else found.step_s
        yield {
            "dtype": dtype,
            "tensor": tensor,
            "logits": f"chunks of {CHUNK_MB:g} MB" if chunks else "whole",
            "predicted MB": f"{found.predicted / 1e6:.0f}",
            "measured MB": f"{found.measured / 1e6:.0f}",
            "error": f"{found.error:+.1%}",
            "processor time / whole": f"{found.step_s / base:.2f}",
        }


def _last_stage(dtype: str, tensor: int, chunked: str) -> RankPeak:
    chosen = (f"parallel.tensor={tensor}", f"train.precision={dtype}", f"model.chunked_loss={chunked}")
    return run_ranks(2 * tensor, layout_peak, STAGE, chosen, timeout_s=TIMEOUT_S)[0]


def main(argv: Sequence[str]) -> int:
    """Print the tables and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks loss", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), metavar="DTYPE", help="fp32, bf16; default both")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help="head, stage; default both")
    args = parse(parser, argv, dtypes=DTYPES, parts=PARTS)
    tables = {}
    for part in args.parts:
        title, rows = PARTS[part]
        tables[part] = table_of(at_once(row for dtype in args.dtypes for row in rows(dtype, args.rounds)), title)
        show(tables[part])
    return finish(args, "loss", tables)


PARTS: dict[str, tuple[str, Callable[[str, int], Iterator[dict[str, object]]]]] = {
    "head": (f"forward and backward of a head, {WORDS:,} words, {TOKENS} tokens, width {WIDTH}", head_rows),
    "stage": ("rank of the last stage under ZB-V, a Llama of 4 layers, 2 pipeline ranks", stage_rows),
}
