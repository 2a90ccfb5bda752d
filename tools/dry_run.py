"""The dry run: what a run would be, printed before any process is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from weft.comm.collectives import CollectiveCosts, Group
from weft.comm.collectives.cache import CostCache, topology_key
from weft.conf.batch import fit_batch
from weft.conf.hosts import most_ranks_of_a_host, read_hostfile, world_size
from weft.conf.schema import WeftConfig
from weft.engine.data import load_tokenizer
from weft.engine.distributed import device_bytes
from weft.engine.planning.crossings import Seat
from weft.engine.planning.estimates import largest_block, planning_costs, settle_placement, stage_sizes
from weft.engine.planning.flops import EFFICIENCY, peak_flops
from weft.engine.planning.memory import zero_memory
from weft.engine.planning.overlap import OverlapPlan, ZeroWork, plan_overlap, with_collectives
from weft.engine.planning.schedules import plan_schedule
from weft.engine.stages import StageSplit, load_hf_config, split_layers
from weft.engine.stages.sizes import PartSize
from weft.pipeline.cell import predict
from weft.pipeline.costs import CostModel
from weft.pipeline.placement import Placement
from weft.pipeline.text import bound_text, bytes_text


@dataclass(frozen=True)
class Outlook:
    """What can be known of a run before it starts; ``flops_per_s`` is what a rank is taken to reach."""

    hf_config: PreTrainedConfig
    placement: Placement
    split: StageSplit
    costs: CostModel
    sizes: list[PartSize]
    replicas: int
    device: str
    flops_per_s: float


def outlook(config: WeftConfig) -> Outlook:
    """The model's stages and their estimated costs on a device such as this machine's.

    Raises:
        ValueError: the model or the data cannot be read.
    """
    if not config.model.path:
        config.model.overrides.setdefault("vocab_size", len(load_tokenizer(config.model, config.data)))
    hf_config = load_hf_config(config.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flops = peak_flops(device) * EFFICIENCY
    replicas = world_size(config.cluster) // config.pipeline.stages
    placement = settle_placement(config, hf_config, replicas=replicas, flops_per_s=flops)
    split = split_layers(hf_config, placement.num_stages, config.pipeline.split, config.pipeline.layers)
    costs = planning_costs(config, hf_config, split, flops_per_s=flops)
    return Outlook(hf_config, placement, split, costs, stage_sizes(hf_config, split), replicas, device.type, flops)


def report(config: WeftConfig) -> str:
    """Stages, parameters and memory of each rank, ZeRO's collectives, and the schedule's predicted step.

    Raises:
        ValueError: the model or the data cannot be read, or no schedule can be had.
    """
    config = fit_batch(config, world_size(config.cluster))
    seen = outlook(config)
    plan, overlap = overlap_lines(config, seen)
    costs = with_collectives(seen.costs, plan) if plan else seen.costs
    pipelines = Seat.of(0, seen.placement, seen.replicas, config.comm.cell).pipelines
    schedule = plan_schedule(
        config.pipeline, seen.placement, costs=costs, pipelines=pipelines, zero_stage=config.zero.stage, overlap=plan
    )
    timeline = predict(schedule, costs, 0)
    lines = [
        f"{seen.hf_config.model_type}, {sum(s.parameters for s in seen.sizes) / 1e6:,.1f} M parameters; "
        f"{schedule.name}, {seen.placement.num_stages} stages on {seen.placement.num_ranks} ranks x "
        f"{seen.replicas} replicas, {schedule.num_microbatches} micro-batches of {config.train.microbatch_size} x "
        f"{config.data.sequence_length} tokens",
        "",
        *_rank_table(config, seen, timeline.peak_bytes),
        *overlap,
        "",
        f"predicted step {timeline.step_s:.4g} s, bubbles {timeline.bubble_share:.1%}, "
        + (f"by {config.pipeline.costs_file}" if config.pipeline.costs_file else _speed(seen)),
        *([bound_text(schedule, costs.for_cell(pipelines), timeline.step_s)] if schedule.name == "auto" else []),
    ]
    return "\n".join(lines)


def most_bytes(config: WeftConfig) -> float:
    """Memory of the fullest rank, in bytes.

    Raises:
        ValueError: as `report`.
    """
    seen = outlook(config)
    schedule = plan_schedule(config.pipeline, seen.placement, costs=seen.costs, zero_stage=config.zero.stage)
    return max(sum(parts) for parts in _rank_bytes(config, seen, predict(schedule, seen.costs, 0).peak_bytes))


def _speed(seen: Outlook) -> str:
    return f"at {seen.flops_per_s / 1e12:.3g} TFLOP/s a rank ({EFFICIENCY:.0%} of this machine's {seen.device})"


def overlap_lines(
    config: WeftConfig, seen: Outlook, collectives: CollectiveCosts | None = None, num_nodes: int = 1
) -> tuple[OverlapPlan | None, list[str]]:
    """How ZeRO's collectives would be partitioned and overlapped, with the reasons; nothing for one replica.

    Args:
        collectives: costs; None takes those that `weft bench collectives` has left for this topology.
        num_nodes: nodes that the replicas of a stage are spread over, where no hostfile says so.
    """
    if seen.replicas < 2:
        return None, []
    group = _replicas(config, seen.replicas, num_nodes)
    key = topology_key(group, seen.device)
    found = collectives or CostCache.in_folder(config.data.cache_dir).read(key)
    if found is None:
        return None, ["", f"ZeRO: collectives {key}: not measured; `weft bench collectives` does it"]
    elements = [size.parameters for size in seen.sizes]
    work = ZeroWork.of(
        config,
        group,
        found,
        elements,
        stages=seen.costs,
        placement=seen.placement,
        largest_block=largest_block(seen.hf_config),
        available=device_bytes(torch.device(seen.device), most_ranks_of_a_host(config.cluster)),
    )
    plan = plan_overlap(work, seen.costs, seen.placement, config.pipeline.microbatches)
    return plan, ["", f"ZeRO-{config.zero.stage} over {key}", *plan.lines()]


def _replicas(config: WeftConfig, count: int, num_nodes: int) -> Group:
    """The replicas of the first virtual stage: neighbouring ranks, on the hosts that hold them."""
    if config.cluster.hostfile:
        slots = read_hostfile(config.cluster.hostfile).values()
        nodes = [node for node, held in enumerate(slots) for _ in range(held)][:count]
        return Group(tuple(range(count)), tuple(nodes))
    if num_nodes < 1 or count % num_nodes:
        raise ValueError(f"--nodes={num_nodes}: {count} replicas cannot be spread evenly over them; give a divisor")
    return Group.regular(num_nodes, count // num_nodes)


def _rank_bytes(config: WeftConfig, seen: Outlook, activations: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """Of each rank: weights, gradients, optimiser, buffers, activations."""
    largest = largest_block(seen.hf_config)
    for rank, held in enumerate(seen.placement.rank_stages):
        zero = zero_memory(
            sum(seen.sizes[stage].parameters for stage in held),
            config.zero,
            config.train.precision,
            seen.replicas,
            largest_block=largest,
            microbatches=config.pipeline.microbatches,
        )
        yield zero.weights, zero.gradients, zero.optimizer, zero.buffers, activations[rank]


def _rank_table(config: WeftConfig, seen: Outlook, activations: tuple[float, ...]) -> list[str]:
    heads = "rank stages layers parameters weights gradients optimiser buffers activations total"
    rows: list[tuple[str, ...]] = [tuple(heads.split())]
    every = _rank_bytes(config, seen, activations)
    for rank, (held, parts) in enumerate(zip(seen.placement.rank_stages, every, strict=True)):
        count = sum(seen.sizes[stage].parameters for stage in held)
        layers = "+".join(f"{seen.split.layers[s].start}-{seen.split.layers[s].stop - 1}" for s in held)
        stages = "+".join(map(str, held))
        memory = [bytes_text(part) for part in (*parts, sum(parts))]
        rows.append((str(rank), stages, layers, f"{count / 1e6:,.2f} M", *memory))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
