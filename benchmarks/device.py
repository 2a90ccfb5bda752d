"""Memory, host waits and host time of training steps on one GPU, compared with the plan."""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.memory import VOCABULARY, random_batches
from benchmarks.results import finish, parse, show
from weft.conf.compose import compose
from weft.tools.tables import table_of

BASE = (
    "recipe=quickstart",
    "pipeline.stages=1",
    "pipeline.placement=straight",
    f"model.overrides.vocab_size={VOCABULARY}",
    "model.self_check=false",
)
LAYOUTS = (
    (),
    ("train.precision=bf16",),
    ("train.precision=fp16",),
    ("pipeline.schedule=auto",),
    ("pipeline.recompute=layers",),
    ("train.precision=bf16", "train.microbatch_size=8"),
    ("train.precision=bf16", "model.lora.enabled=true"),
)
"""Departures from the quickstart on one rank."""
STEPS = 4


def measure(layout: Sequence[str]) -> dict[str, Any]:
    """Train a layout on the GPU and return its row of the table."""
    from weft.engine.initialize import initialize

    gc.collect()
    config = compose([*BASE, *layout])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(random_batches(config))
    host_s, waits = [], Counter[str]()
    for step in range(STEPS):
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if step == STEPS - 1 else "default")
            engine.train_batch()
            torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))
        host_s.append(time.process_time() - start)
    measured = torch.cuda.max_memory_allocated() - before
    predicted = engine.plan.memory[engine.pipe_rank].total
    engine.destroy()
    return {
        "layout": " ".join(layout) or "quickstart",
        "predicted MB": f"{predicted / 1e6:.1f}",
        "measured MB": f"{measured / 1e6:.1f}",
        "error": f"{predicted / measured - 1:+.1%}",
        "host ms a micro-batch": f"{1e3 * min(host_s) / config.pipeline.microbatches:.1f}",
        "host waits": ", ".join(f"{line} ({count})" for line, count in waits.items()) or "none",
    }


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code.

    Raises:
        ValueError: there is no GPU.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    args = parse(parser, argv)
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU: this benchmark compares a GPU's memory with the plan; `benchmarks memory` is for CPUs"
        )
    rows = []
    for layout in LAYOUTS:
        rows.append(measure(layout))
        print(rows[-1], flush=True)
    table = table_of(rows, "one rank of the quickstart on a GPU")
    show(table)
    return finish(args, "device", table)
