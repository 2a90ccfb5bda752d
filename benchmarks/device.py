"""Memory, host waits and host time of training steps on GPUs, compared with the plan."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.memory import QUICKSTART, known_bandwidth, memory_row, random_batches
from benchmarks.results import finish, parse, show
from weft.conf.compose import compose
from weft.tools.tables import table_of

BASE = (
    *QUICKSTART,
    "pipeline.stages=1",
    "pipeline.microbatches=4",
    "model.overrides.num_key_value_heads=4",
)
"""In fp32, torch's fused attention needs as many heads of keys as of queries. Other kinds store scores."""
_ADAPTERS = ("model.lora.enabled=true", "model.lora.target_modules=[all-linear]")
# Without a rate, a copy of 32 MiB would measure it, which is more than the peak of some layouts.
_OFFLOADS = ("pipeline.stages=2", "pipeline.offload=true", "pipeline.offload_mbps=200000")
_CAPPED = (*_OFFLOADS, "pipeline.schedule=auto", "pipeline.memory_cap_bytes=14000000", "train.precision=bf16")
LAYOUTS = (
    (1, ()),
    (1, ("train.precision=bf16",)),
    (1, ("train.precision=fp16",)),
    (1, ("pipeline.schedule=auto",)),
    (1, ("pipeline.recompute=layers",)),
    (1, ("train.precision=bf16", "train.microbatch_size=8")),
    (1, ("train.precision=bf16", "model.lora.enabled=true")),
    (1, _ADAPTERS),
    (1, (*_ADAPTERS, "train.precision=bf16")),
    (1, (*_ADAPTERS, "train.precision=bf16", "pipeline.recompute=layers")),
    (2, ("zero.stage=1",)),
    (2, ("zero.stage=2", "train.precision=bf16")),
    (2, ("zero.stage=3",)),
    (2, ("zero.stage=3", "train.precision=bf16", "model.lora.enabled=true")),
    (2, (*_ADAPTERS, "zero.stage=3")),
    (2, (*_ADAPTERS, "pipeline.stages=2", "pipeline.schedule=zbv", "train.precision=bf16")),
    (2, (*_OFFLOADS, "pipeline.schedule=1f1b", "pipeline.memory_cap_bytes=30000000")),
    (2, _CAPPED),
    (2, (*_CAPPED, *_ADAPTERS)),
    (2, ("parallel.tensor=2",)),
    (2, ("parallel.context=2", "train.precision=bf16")),
    (2, ("pipeline.stages=2", "pipeline.placement=straight", "pipeline.schedule=gpipe")),
    (2, ("pipeline.stages=2", "pipeline.schedule=interleaved", "train.precision=bf16")),
    (2, ("pipeline.stages=2", "pipeline.schedule=w", "pipeline.recompute=layers")),
    (2, ("pipeline.stages=2", "pipeline.schedule=zbv", "train.precision=fp16")),
    (2, ("pipeline.stages=2", "pipeline.schedule=1f1b", "pipeline.recompute=elementwise")),
    (2, ("pipeline.stages=2", "pipeline.schedule=zbv", "pipeline.recompute=elementwise")),
    (2, (*_OFFLOADS, "pipeline.schedule=auto", "pipeline.memory_cap_bytes=40000000")),
    (4, ("pipeline.stages=2", "pipeline.schedule=dualpipev", "zero.stage=1", "train.precision=bf16")),
    (4, ("pipeline.stages=2", "pipeline.schedule=auto", "zero.stage=2", "pipeline.recompute=attention")),
    (4, ("pipeline.stages=2", "pipeline.schedule=zbv", "zero.stage=3")),
    (4, ("pipeline.stages=2", "pipeline.schedule=w", "zero.stage=3")),
    (4, ("pipeline.stages=2", "pipeline.schedule=1f1b", "zero.stage=3", "train.precision=bf16")),
    (4, ("pipeline.stages=2", "pipeline.schedule=1f1b", "zero.stage=3", "zero.reduce_every=1")),
)
"""Numbers of ranks, and departures from the quickstart."""
STEPS = 4
EMULATED_STEPS = 2
WORST_ERROR = 0.03
TIMEOUT_S = 1500.0


def measure(layout: Sequence[str], steps: int = STEPS) -> dict[str, Any]:
    """Train a layout on this rank's GPU and return figures of the rank. A collective call."""
    from weft.engine.initialize import initialize

    gc.collect()
    config = compose([*BASE, *layout])
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine, *_ = initialize(config=config)
    engine.set_dataiterator(random_batches(config))
    host_s, waits = [], Counter[str]()
    for step in range(steps):
        start = time.process_time()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if step == steps - 1 else "default")
            engine.train_batch()
            torch.cuda.set_sync_debug_mode("default")
        waits.update(f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))
        host_s.append(time.process_time() - start)
    measured = torch.cuda.max_memory_allocated() - before
    predicted = engine.plan.memory[engine.pipe_rank].total
    if dist.is_initialized():
        dist.barrier()
    engine.destroy()
    return {
        "layout": " ".join(layout) or "quickstart",
        "rank": engine.global_rank,
        "predicted": predicted,
        "measured": measured,
        "error": predicted / measured - 1,
        "host_ms": 1e3 * min(host_s) / config.pipeline.microbatches,
        "waits": ", ".join(f"{line} ({count})" for line, count in waits.items()) or "none",
    }


def measure_emulated(layouts: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return figures of this rank's emulated GPU in each of the layouts, whose attention stores no scores."""
    cuda = import_module("tests.device.cuda")  # a peer only, which is not checked with Weft
    cuda.native.emulated_fuse_attention()
    with known_bandwidth():
        return [measure(layout, EMULATED_STEPS) for layout in layouts]


def emulated() -> Iterator[dict[str, Any]]:
    """Yield the figures of the rank with the worst prediction in each layout, on emulated GPUs (docs/device.md).

    `least` is the least error of a rank.
    """
    run_on_devices = import_module("tests.device.ranks").run_on_devices
    for num_ranks in sorted({ranks for ranks, _ in LAYOUTS}):
        layouts = [layout for ranks, layout in LAYOUTS if ranks == num_ranks]
        by_rank = run_on_devices(num_ranks, measure_emulated, layouts, timeout_s=TIMEOUT_S)
        for found in zip(*by_rank, strict=True):
            worst = max(found, key=lambda rank: abs(rank["error"]))
            yield worst | {"ranks": num_ranks, "least": min(rank["error"] for rank in found)}


def recipe_peak(key: str, settings: list[str]) -> dict[str, Any]:
    """Run a recipe on this rank's emulated GPU, and return its peak bytes. A collective call."""
    import_module("tests.device.cuda").native.emulated_fuse_attention()
    scored = import_module("tests.recipes.preferences").train_with_key(key, settings)
    return {"peak": torch.cuda.max_memory_allocated(), "scored": ", ".join(scored) or "in the forward"}


def frozen_rows(width: int = 512) -> Iterator[dict[str, object]]:
    """Yield rows about the recipes dpo and distill on two emulated GPUs. Weights of ``width`` dominate.

    With workers the first steps are still computed in line, and count.
    """
    scorers, run_on_devices = (
        import_module("tests.inference.scorers"),
        import_module("tests.device.ranks").run_on_devices,
    )
    preferences, distill = import_module("tests.recipes.preferences"), import_module("tests.recipes.test_distill")
    for recipe, name, prepare in (("dpo", "model", preferences.prepare), ("distill", "teacher", distill.prepare_both)):
        with tempfile.TemporaryDirectory(prefix="weft-frozen-") as folder:
            settings = [*prepare(Path(folder), width=width), "cluster.ranks=2", "pipeline.stages=2", "train.steps=8"]
            settings.append("pipeline.microbatches=4")
            frozen = AutoModelForCausalLM.from_pretrained(Path(folder, name), dtype=torch.float32)
            with scorers.worker(frozen) as (url, _):
                ahead = [f"inference.controller.workers=[{{url: '{url}', boards: [none]}}]", "inference.enabled=true"]
                ahead += ["inference.scores.enabled=true", f"inference.boards={folder}/boards"]
                for where, more in (("in line", ["train.name=inline"]), ("ahead", [*ahead, "train.name=ahead"])):
                    found = run_on_devices(2, recipe_peak, scorers.KEY, [*settings, *more], timeout_s=TIMEOUT_S)
                    yield {
                        "recipe": recipe,
                        "frozen model": f"{sum(weight.nbytes for weight in frozen.parameters()) / 1e6:.1f} MB",
                        "scores": where,
                        "peaks of ranks, MB": " ".join(f"{rank['peak'] / 1e6:.1f}" for rank in found),
                        "micro-batches of the last step": found[-1]["scored"],
                    }


def main(argv: Sequence[str]) -> int:
    """Print the table and return the exit code. Raise ValueError if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a layout on a GPU")
    parser.add_argument("--emulated", action="store_true", help="memory of all layouts, on the tests' emulated GPUs")
    parser.add_argument("--frozen", action="store_true", help="memory of a reference and of a teacher, on the same")
    args = parse(parser, argv)
    if args.frozen:
        table = table_of(frozen_rows(), "recipes with a frozen model, whose scores are computed in line or ahead")
        show(table)
        return finish(args, "device", table)
    if args.emulated:
        measured = list(emulated())
        title = "peak of tensors on the rank with the worst prediction, emulated GPUs"
        table = table_of(map(_memory_row, measured), title)
        met = all(each["least"] >= 0 and abs(each["error"]) <= WORST_ERROR for each in measured)
        show(table, f"goal (no plan below its peak, or over {WORST_ERROR:.0%} above): {'met' if met else 'MISSED'}")
        return finish(args, "device", table, met=met)
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU: this benchmark compares a GPU's memory with the plan; add --emulated for the tests' emulated "
            "GPUs, or use `benchmarks memory` for CPUs"
        )
    rows = []
    for num_ranks, layout in LAYOUTS:
        if num_ranks > 1:
            continue
        found = measure(layout, args.steps)
        figures = {"host ms a micro-batch": f"{found['host_ms']:.1f}", "host waits": found["waits"]}
        rows.append(_memory_row(found) | figures)
        print(rows[-1], flush=True)
    table = table_of(rows, "one rank of the quickstart on a GPU")
    show(table)
    return finish(args, "device", table)


def _memory_row(found: dict[str, Any]) -> dict[str, object]:
    where = {name: found[name] for name in ("ranks", "rank") if "ranks" in found}
    least = {"least error": f"{found['least']:+.2%}"} if "least" in found else {}
    return memory_row(found["layout"], found["predicted"], found["measured"], **where) | least
