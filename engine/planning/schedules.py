"""Plan placement and schedule from the configuration. No torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.conf.checks import chunks_of, settled_placement
from weft.conf.schema import PairChoice, PipelineConfig
from weft.engine.planning.overlap import OverlapPlan
from weft.pipeline.action import SENDS, Op, receive_of
from weft.pipeline.cell import add_relays, pipeline_of, side_by_side, uplink_order
from weft.pipeline.choice import choose, placements
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.generators.offload import add_offloads
from weft.pipeline.lowering import as_run, lower, open_pairs, split_backwards
from weft.pipeline.memory import peak_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.profile import load_costs, load_pieces
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import load_schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.validation import validate

SPLIT_GAIN = 0.05
"""Share of the predicted step that split backwards must save. The costs do not include their bookkeeping, which takes
up to a tenth of a small model's step."""


def open_placements(config: PipelineConfig, sites: tuple[int, ...] = ()) -> dict[str, Placement]:
    """Return the placements that the configuration allows, by name. Only `auto` allows several.

    Args:
        sites: pipeline ranks per site. Empty is one site.

    Raises:
        ValueError: the schedule's file cannot be read, or is for a cell or for another number of ranks.
    """
    if config.schedule.name == "file":
        placement = _schedule_of_file(config, config.microbatches).placement
        return {"file": replace(placement, sites=sites or (placement.num_ranks,))}
    kind = settled_placement(config)
    if kind is None:
        return placements(config.stages, sites)
    return {kind.name: Placement.named(kind.name, config.stages, sites, chunks_of(kind, config))}


def plan_placement(
    config: PipelineConfig,
    sites: tuple[int, ...] = (),
    *,
    costs_of: Callable[[Placement], CostModel],
    pipelines: int = 1,
) -> Placement:
    """Return the configured placement, or with `auto` the placement with the shortest predicted step.

    Args:
        sites: pipeline ranks per site. Empty is one site.
        costs_of: returns the costs of one pipeline on a placement. Raises ValueError if the model cannot be cut for it.
        pipelines: number of pipelines of a DP-cell.

    With `jitter_samples` the mean of sampled steps is compared.

    Raises:
        ValueError: the schedule's file cannot be read, or no placement is possible.
    """
    candidates = open_placements(config, sites)
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    cap = float(config.memory_cap_bytes) or None
    quick = replace(config, search_seconds=0.0)
    offloading = partial(_with_offloads, quick, num_microbatches=config.microbatches)
    chosen = choose(
        candidates,
        costs_of,
        config.microbatches,
        pipelines=pipelines,
        memory_cap_bytes=cap,
        jitter_samples=config.jitter_samples,
        schedule_of=offloading if config.offload and cap else None,
    )
    return chosen.best.schedule.placement.single


def _schedule_of_file(config: PipelineConfig, num_microbatches: int) -> Schedule:
    """Read the schedule of one pipeline from ``schedule_file``, and check that it fits the configuration.

    Args:
        num_microbatches: number that the schedule must have. 0 accepts any number.
    """
    name = f"pipeline.schedule_file={config.schedule_file}"
    try:
        schedule = load_schedule(Path(config.schedule_file).expanduser())
    except ValueError as error:
        raise ValueError(f"{name}: {error}; write one with `weft schedule --format json`") from error
    placement = schedule.placement
    if placement.pipelines > 1:
        raise ValueError(
            f"{name}: it is of a cell of {placement.pipelines} pipelines; write that of one, and set comm.cell"
        )
    if placement.num_ranks != config.stages:
        raise ValueError(
            f"{name}: it is of {placement.num_ranks} pipeline ranks, and pipeline.stages={config.stages}; "
            "make them alike"
        )
    if num_microbatches not in (0, schedule.num_microbatches):
        raise ValueError(
            f"{name}: it is of {schedule.num_microbatches} micro-batches, and a step has {num_microbatches}; "
            f"set pipeline.microbatches={schedule.num_microbatches}"
        )
    return schedule


def read_costs(config: PipelineConfig, num_stages: int) -> CostModel:
    """Read the costs in ``config.costs_file``.

    Raises:
        ValueError: the file cannot be read, or is for another number of virtual stages.
    """
    path = Path(config.costs_file).expanduser()
    try:
        return load_pieces(path).cut(num_stages) if settled_placement(config) is None else load_costs(path, num_stages)
    except ValueError as error:
        raise ValueError(f"pipeline.costs_file: {error}; a run with train.timeline=true leaves one") from error


def plan_schedule(
    config: PipelineConfig,
    placement: Placement,
    *,
    num_microbatches: int = 0,
    costs: CostModel | None = None,
    pipelines: int = 1,
    zero_stage: int = 0,
    overlap: OverlapPlan | None = None,
) -> Schedule:
    """Return the lowered and validated schedule of one training step.

    Args:
        num_microbatches: overrides ``config.microbatches``. 0 does not.
        costs: costs of one pipeline, for schedules that depend on them. None means unit costs.
        pipelines: number of pipelines of a DP-cell, which is planned as a whole.
        overlap: plan whose layer and model tiers fixed schedules follow, as far as memory allows.

    Raises:
        ValueError: the kind of schedule does not fit the placement or the number of micro-batches,
            or the result exceeds the memory cap.
    """
    cap = float(config.memory_cap_bytes) or None
    alone = costs or CostModel.unit(placement.num_stages)
    costs = alone.for_cell(pipelines)
    kind = config.schedule.name
    as_one = kind == "auto" and pipelines > 1
    if config.offload and cap:
        schedule = _with_offloads(config, placement, alone, num_microbatches or config.microbatches)
    elif kind == "file":
        schedule = replace(_schedule_of_file(config, num_microbatches or config.microbatches), placement=placement)
    else:
        schedule = generate(
            kind,
            replace(placement, pipelines=pipelines) if as_one else placement,
            num_microbatches or config.microbatches,
            costs=costs if as_one else alone,
            memory_cap_bytes=cap,
            search_seconds=config.search_seconds,
            launch_together=config.launch_together,
            jitter_samples=config.jitter_samples,
        )
        if overlap is not None and not config.offload and not generators()[kind].looks_at_costs:
            schedule = _with_overlap(schedule, config, alone, overlap)
    if not as_one:
        schedule = side_by_side(schedule, pipelines)
    if config.pairs is not PairChoice.always:
        schedule = as_run(schedule, costs)
    lowered = add_relays(lower(schedule, zero_stage=zero_stage), costs)
    validate(lowered, costs=costs, memory_cap_bytes=cap)
    return lowered


def _with_offloads(config: PipelineConfig, placement: Placement, costs: CostModel, num_microbatches: int) -> Schedule:
    """Return the schedule of a kind with the offloads that it needs under the memory cap.

    `auto` adds them to several schedules, its own ones in more memory and the fixed ones of the placement, and takes
    the shortest, which may have none.
    """
    kind, cap = config.schedule.name, float(config.memory_cap_bytes)
    fixed = [name for name, spec in generators().items() if not spec.looks_at_costs and name != "dualpipev"]
    wanted: list[tuple[str, float]] = [(kind, 0.0)]
    if kind == "auto":
        wanted = [("auto", cap * more) for more in (1.0, 1.5, 2.0, 3.0, 4.0)] + [(name, 0.0) for name in fixed]
    found: list[Schedule] = []
    errors: list[ValueError] = []
    for name, memory in wanted:
        try:
            made = generate(
                name,
                placement,
                num_microbatches,
                costs=costs,
                memory_cap_bytes=memory or None,
                search_seconds=config.search_seconds / len(wanted),
                launch_together=config.launch_together,
            )
        except ValueError:
            continue  # another placement, or more memory
        try:
            found.append(replace(add_offloads(open_pairs(made), costs, cap), name=kind))
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda schedule: simulate(lower(schedule), costs).step_s)


def _with_overlap(schedule: Schedule, config: PipelineConfig, costs: CostModel, overlap: OverlapPlan) -> Schedule:
    """Return a fixed schedule with the plan's number of micro-batches launched together, and its split backwards."""
    kind, least = config.schedule.name, schedule.placement.num_ranks

    def launching(count: int) -> Schedule:
        return generate(kind, schedule.placement, schedule.num_microbatches, launch_together=count)

    if generators()[kind].goes_in_rounds and not config.launch_together:
        more = range(least + 1, overlap.together + 1)
        fits = bisect_right(more, overlap.memory_bytes, key=lambda count: peak_bytes(launching(count), costs))
        schedule = launching(least + fits) if fits else schedule
    if not overlap.input_first:
        return schedule
    split = split_backwards(schedule, overlap.input_first)
    gains = simulate(split, costs).step_s < (1 - SPLIT_GAIN) * simulate(schedule, costs).step_s
    return split if gains and peak_bytes(split, costs) <= overlap.memory_bytes else schedule


def plan_schedules(
    config: PipelineConfig,
    placement: Placement,
    sizes: Collection[int],
    **how: Any,
) -> dict[int, Schedule]:
    """Return the schedules of DP-cells with these numbers of pipelines. ``how`` has arguments of `plan_schedule`."""
    return {size: plan_schedule(config, placement, pipelines=size, **how) for size in sorted(set(sizes))}


@dataclass(frozen=True)
class RankSchedule:
    """The part of a DP-cell's schedule that one rank executes in a step.

    Attributes:
        priorities: by tag of each message that the rank sends between sites, its index in the order of all
            transfers over the same uplinks of the cell.
    """

    schedule: Schedule
    priorities: Mapping[str, int]

    @classmethod
    def of(cls, cell: Schedule, local_rank: int, pipe_rank: int) -> RankSchedule:
        """Return the part of the pipeline rank ``pipe_rank`` of the cell's pipeline ``local_rank``."""
        single = cell.placement.single
        carried = uplink_order(cell, local_rank * single.num_ranks + pipe_rank)
        priorities = {
            str(receive_of(action._replace(stage=action.stage - local_rank * single.num_stages))): priority
            for priority, action in enumerate(carried)
            if action.op in SENDS
        }
        return cls(pipeline_of(cell, local_rank), priorities)


def plan_evaluation(placement: Placement, num_microbatches: int, *, zero_stage: int = 0) -> Schedule:
    """Return the lowered schedule of an evaluation: the forwards of ``num_microbatches``, and their transfers."""
    keep = {Op.F, Op.SEND_F, Op.RECV_F, Op.UNSHARD, Op.RESHARD}
    schedule = generate("gpipe", placement, num_microbatches)
    forwards = schedule.with_rows([[slot for slot in row if slot[0].op is Op.F] for row in schedule.rows])
    schedule = lower(forwards, zero_stage=zero_stage)
    return schedule.with_rows([[slot for slot in row if slot[0].op in keep] for row in schedule.rows])
