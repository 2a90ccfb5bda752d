"""`weft profile`: what a model's layers take on this machine, as costs that plans and runs read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import PreTrainedConfig

from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.files import write_atomic
from weft.conf.schema import WeftConfig
from weft.engine.planning.devices import data_sheet
from weft.engine.planning.layer_costs import measure_layers, measured_layers
from weft.engine.precision import DTYPES
from weft.engine.stages.tracing import trace_model
from weft.pipeline.costs import CostModel, LinkCost, StageCost
from weft.pipeline.limits import number
from weft.pipeline.planner.workload import ModelWork
from weft.pipeline.profile import costs_to_yaml
from weft.pipeline.text import bytes_text
from weft.tools.benchmarks.peers.link import measure_link
from weft.tools.dry_run import settled_model
from weft.tools.tables import show, table_of


def main(argv: Sequence[str]) -> int:
    """Run ``weft profile [--out FILE] [--seconds S] [recipe=NAME] [key=value ...]``.

    Raises:
        ValueError: bad input, a model that cannot be cut into layers, or that does not fit the device.
    """
    args, overrides = _parser().parse_known_args(argv)
    seconds = number(args.seconds, "--seconds", above=0.0)
    if args.out.is_dir() or not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out}: cannot be written; name a file in a folder that is there")
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
    write_atomic(args.out, _HEAD + costs_to_yaml(costs, per="layers", measured=_measured(config, hf_config, device)))
    show(table_of(_rows(work, stages), f"{hf_config.model_type} on {_name(device)}, a micro-batch"))
    print(f"wrote {args.out} in {perf_counter() - started:.0f} s")
    return 0


_HEAD = (
    "# Costs of each layer of a model, measured by `weft profile`; the first has the embedding, the last the head.\n"
    "# `weft plan --profile FILE` and pipeline.costs_file=FILE read it.\n"
)


def _local(stages: Sequence[StageCost]) -> LinkCost:
    """The link between two ranks of this machine, by what a layer hands on."""
    return measure_link(max(4, int(max(stage.output_bytes for stage in stages)) // 4 * 4), shared=True)


def _measured(config: WeftConfig, hf_config: PreTrainedConfig, device: torch.device) -> dict[str, object]:
    kind = data_sheet(device)
    return {
        "gpu": "" if kind is None else kind.name,
        "device": _name(device),
        "model": config.model.path or hf_config.model_type,
        "sequence_length": config.data.sequence_length,
        "microbatch_size": config.train.microbatch_size,
        "precision": config.train.precision.value,
        "gradient_checkpointing": config.model.gradient_checkpointing,
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft profile",
        usage="weft profile [options] [recipe=NAME] [key=value ...]",
        description="Time one layer of each kind at the real shapes, as costs that plans and runs read.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("profile.yaml"), metavar="FILE", help="default profile.yaml")
    parser.add_argument("--seconds", default="60", help="to time layers in; default 60")
    parser.add_argument(
        "--no-links", dest="links", action="store_false", help="leave out the link between ranks of this machine"
    )
    return parser
