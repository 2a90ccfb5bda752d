"""`weft profile`: measures a model's layers on this machine, as costs that plans and runs read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter

import torch
from transformers import PreTrainedConfig

from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.host.files import require_writable, write_atomic
from weft.conf.schema import Recompute, WeftConfig
from weft.engine.models.tracing import trace_model
from weft.engine.planning.devices import data_sheet
from weft.engine.planning.layer_costs import measure_layers, measured_layers
from weft.engine.precision import DTYPES
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.limits import number
from weft.pipeline.profile import costs_to_yaml
from weft.pipeline.text import bytes_text
from weft.pipeline.workload import ModelWork
from weft.tools import parsers
from weft.tools.dry_run import settled_model
from weft.tools.host_collectives import measure_host, store
from weft.tools.links import Way, measure_link
from weft.tools.tables import show, table_of

MOST_PROCESSES = 16
"""Maximum number of ranks of a host without GPUs."""
_LEAST_BETA_S = 1e-13
"""Seconds per byte below which a measurement does not show a bandwidth."""


def main(argv: Sequence[str]) -> int:
    """Run ``weft profile [--out FILE] [--seconds S] [recipe=NAME] [key=value ...]``.

    Raises:
        ValueError: bad input, a model that cannot be cut into layers, or that does not fit the device.
    """
    parser = parsers.profile()
    args, overrides = parser.parse_known_args(argv)
    seconds = number(args.seconds, "--seconds", above=0.0)
    require_writable("--out", args.out)
    ranks = _ranks(args.ranks)
    if not args.links:
        parsers.refuse_unused(parser, argv, ("ranks",), "--no-links skips what ranks measure; leave out one")
    config = compose(overrides)
    check(config)
    started = perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hf_config = settled_model(config)
    work = trace_model(hf_config, config.data.sequence_length, dtype=DTYPES[config.train.precision])
    try:
        stages = measure_layers(config, hf_config, work, device, seconds=seconds)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"train.microbatch_size={config.train.microbatch_size}: a layer does not fit the device "
            f"({str(error).splitlines()[0]}); lower it, or data.sequence_length"
        ) from error
    costs = CostModel(stages=stages, local=_local(stages) if args.links else LinkCost())
    show(table_of(_rows(work, stages), f"{hf_config.model_type} on {_name(device)}, a micro-batch"))
    code, measured = 0, _measured(config, hf_config, device)
    if args.links and ranks > 1:
        try:
            measured |= {"collectives": _collectives(ranks, config.data.cache_dir)}
        except RuntimeError as error:
            print(f"weft profile: {error}", file=sys.stderr)
            code = 1
    write_atomic(args.out, _HEAD + costs_to_yaml(costs, per="layers", measured=measured))
    print(f"wrote {args.out} in {perf_counter() - started:.0f} s")
    return code


_HEAD = (
    "# Costs of each layer of a model, measured by `weft profile`; the first has the embedding, the last the head.\n"
    "# `weft plan --profile FILE` and pipeline.costs_file=FILE read it.\n"
)


def _ranks(asked: str | None) -> int:
    """Return the number of processes that measure collectives: one per GPU, or two without GPUs."""
    most = torch.cuda.device_count() if torch.cuda.is_available() else MOST_PROCESSES
    if asked is None:
        return min(most, torch.cuda.device_count() or 2)
    ranks = number(asked, "--ranks", above=0.0)
    if ranks != int(ranks) or ranks > most:
        raise ValueError(
            f"--ranks {asked}: expected a whole number of at most {most}, the ranks that this host can hold"
        )
    return int(ranks)


def _collectives(ranks: int, cache_dir: str) -> dict[str, float]:
    """Measure collectives within this host, store and print the results, and return those that plans read.

    Raises:
        RuntimeError: a rank failed.
    """
    found = measure_host(ranks)
    store(found, cache_dir)
    lines = [
        {
            "among": key.split(",")[0],
            "primitive": primitive.value,
            "latency us": f"{line.alpha_s * 1e6:.0f}",
            "GB/s": f"{1e-9 / line.beta_s:.2f}" if line.beta_s > _LEAST_BETA_S else "",
        }
        for key, costs in found.costs.items()
        for (_, primitive), line in costs.table.items()
    ]
    tables = [table_of(lines, "collectives inside of this host", left=2)]
    if found.overlap is not None:
        factors = [{"compute": kind, "OEF": f"{factor:.2f}"} for kind, factor in found.overlap.factors.items()]
        tables.append(table_of(factors, "compute alongside a collective"))
    show(*tables)
    print(f"runs with data.cache_dir={cache_dir} on this host plan with these")
    alpha_s, beta_s = found.line_of_all(ranks)
    return {
        "ranks": ranks,
        "latency_us": alpha_s * 1e6,
        "gb_per_s": 1e-9 / max(beta_s, _LEAST_BETA_S),
    }


def _local(stages: Sequence[StageCost]) -> LinkCost:
    """Measure the link between two ranks of this machine with messages as large as a layer's output."""
    return measure_link(max(4, int(max(stage.output_bytes for stage in stages)) // 4 * 4), Way.shared)


def _measured(config: WeftConfig, hf_config: PreTrainedConfig, device: torch.device) -> dict[str, object]:
    kind = data_sheet(device)
    return {
        "gpu": "" if kind is None else kind.name,
        "device": _name(device),
        "model": config.model.path or hf_config.model_type,
        "sequence_length": config.data.sequence_length,
        "microbatch_size": config.train.microbatch_size,
        "precision": config.train.precision.value,
        "gradient_checkpointing": config.pipeline.recompute is Recompute.layers,
    }


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def _rows(work: ModelWork, stages: Sequence[StageCost]) -> list[dict[str, str]]:
    last = len(stages) - 1
    with_more = {0: " with embedding", last: " with head and loss"}
    return [
        {
            "layer": f"{layer}{with_more.get(layer, '')}",
            "F ms": f"{cost.forward_s * 1e3:.2f}",
            "I ms": f"{cost.input_s * 1e3:.2f}",
            "W ms": f"{cost.weight_s * 1e3:.2f}",
            "saved": bytes_text(cost.activation_bytes),
            "kept for W": bytes_text(cost.weight_saved_bytes),
            "optimiser ms": f"{cost.step_s * 1e3:.2f}",
        }
        for layer, cost in ((layer, stages[layer]) for layer in measured_layers(work))
    ]
