"""The plan of a run: one value that the run, the dry run, `weft plan` and predictions read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from weft.conf.schema import Partition, Recompute, WeftConfig
from weft.conf.training_checks import level_problem
from weft.engine.layout import CellMember, RankLayout
from weft.engine.models.sizes import PartSize
from weft.engine.planning.estimates import planning_costs, rank_size, stage_sizes, working_bytes
from weft.engine.planning.facts import Facts
from weft.engine.planning.memory import RankBytes, activation_memory, gathered_weights, rank_memory, rank_states
from weft.engine.planning.overlap import OverlapPlan, ZeroWork, plan_overlap, with_collectives
from weft.engine.planning.recomputation import LEVELS, Choice, RecomputeSearch, choice_text
from weft.engine.planning.schedules import plan_placement, plan_schedule, plan_schedules
from weft.engine.stages.cutting.split import StageSplit, split_model
from weft.pipeline.action import Slot
from weft.pipeline.cell import cell_step_s, pipeline_of, predict
from weft.pipeline.costs import CostModel
from weft.pipeline.generators.auto import own_cap_bytes
from weft.pipeline.memory import WEIGHT_BYTES, RankMemory, ZeroMemory, small_bytes, stepping_bytes
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.text import bytes_text, own_cap_text
from weft.pipeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run and its predicted cost.

    Attributes:
        placement: virtual stages of each pipeline rank, with the sites of the layout's reference route.
        costs: costs of one pipeline on that route, without ZeRO's collectives.
        overlap: how ZeRO's collectives are partitioned and overlapped, or None without such a plan.
        members: each line's position in its DP-cell.
        schedules: lowered schedules of DP-cells, by their number of pipelines.
        memory: memory of each pipeline rank of the first line.
        recompute: what each virtual stage computes again in its backward.
        own_cap_bytes: limit of activations on each rank that `auto` has set, or None if it has set none.
        step_s: predicted seconds of a step of the slowest pipeline, because replicas wait for each other.
        bubble_share: predicted share of a step in which ranks do not compute.
    """

    facts: Facts
    placement: Placement
    split: StageSplit
    costs: CostModel
    overlap: OverlapPlan | None
    members: tuple[CellMember, ...]
    schedules: dict[int, Schedule]
    memory: tuple[RankMemory, ...]
    recompute: tuple[Recompute, ...] = ()
    own_cap_bytes: float | None = None
    step_s: float
    bubble_share: float

    @property
    def layout(self) -> RankLayout:
        """The layout of the job's ranks."""
        return self.facts.layout

    @property
    def step_costs(self) -> CostModel:
        """`costs` with ZeRO's collectives, for predictions."""
        return _step_costs(self.costs, self.overlap)

    def schedule(self, line: int = 0) -> Schedule:
        """Return the schedule of a line's DP-cell, with the sites of the line's route."""
        return _at_sites(self.schedules[self.members[line].pipelines], self.layout.sites_of(self.layout.route_of(line)))

    def row(self, rank: int) -> tuple[Slot, ...]:
        """Return a global rank's actions of a step, in order."""
        at = self.layout.position(rank)
        return pipeline_of(self.schedule(at.line), self.members[at.line].local_rank).rows[at.stage]

    def schedules_for(self, config: WeftConfig, num_microbatches: int) -> dict[int, Schedule]:
        """Return `schedules` for another number of micro-batches than the configuration's."""
        return plan_schedules(
            config.pipeline,
            self.placement,
            self.schedules,
            costs=self.costs,
            num_microbatches=num_microbatches,
            zero_stage=config.zero.stage,
            overlap=self.overlap,
        )

    def predicted(self, line: int = 0, costs: CostModel | None = None) -> Timeline:
        """Return the predicted timeline of a line's step. The other lines of its DP-cell run at the same time.

        Args:
            costs: costs of one pipeline. None takes `step_costs`, with the links of the line's sites.
        """
        costs = costs or _on_route(self.step_costs, self.facts, self.layout.route_of(line))
        return predict(self.schedule(line), costs, self.members[line].local_rank)

    def summary(self) -> str:
        """Return one line about the prediction."""
        most = bytes_text(max(memory.total for memory in self.memory))
        cap = f"; {text}" if (text := self.cap_text()) else ""
        again = f"; {text}" if (text := choice_text(self.recompute)) else ""
        step = f"predicted step {self.step_s:.4g} s, bubbles {self.bubble_share:.1%}"
        return f"{step}, {most} on the fullest rank{cap}{again}"

    def cap_text(self) -> str:
        """Describe the memory cap that `auto` has set. Return an empty string if it has set none."""
        if self.own_cap_bytes is None:
            return ""
        return f"auto has set {own_cap_text(self.own_cap_bytes, max(memory.activations for memory in self.memory))}"


def plan_run(config: WeftConfig, facts: Facts, placement: Placement | None = None) -> RunPlan:
    """Plan a run from facts. The result is deterministic unless a search reaches its time limit.

    Args:
        placement: from `settle_placement`, before links were opened. None calls it.

    Raises:
        ValueError: no schedule is possible, because a setting does not fit the model or the memory.
    """
    placement = placement or settle_placement(config, facts)
    split = split_stages(config, facts, placement)
    parts = stage_sizes(facts.model, split)
    states = rank_states(config, facts, placement, split)
    recompute = _recompute(config, facts, placement, split, states)
    costs = planning_costs(config, facts, split, recompute)
    overlap = _plan_overlap(config, facts, placement, costs, parts, states)
    members = tuple(CellMember.all(facts.layout, config.comm.cell))
    sizes = [member.pipelines for member in members]
    schedules = plan_schedules(
        config.pipeline, placement, sizes, costs=costs, zero_stage=config.zero.stage, overlap=overlap
    )
    first = schedules[sizes[0]]
    working = working_bytes(config, facts, split, costs, recompute)
    ranks = [
        RankBytes(state, _between_steps(config, facts, split, held), _small_bytes(config, facts, split, held))
        for state, held in zip(states, placement.rank_stages, strict=True)
    ]
    trained = [part.held_trained for part in parts]
    stepping_costs = _step_costs(costs, overlap)
    return RunPlan(
        facts=facts,
        placement=placement,
        split=split,
        costs=costs,
        overlap=overlap,
        members=members,
        schedules=schedules,
        recompute=recompute,
        own_cap_bytes=_own_cap_bytes(config, first, costs),
        memory=rank_memory(config, first, costs, ranks, trained, working, gathered_weights(config, facts, split)),
        step_s=max(_route_step_s(facts, route, schedules, stepping_costs) for route in range(facts.layout.routes)),
        bubble_share=predict(first, stepping_costs, 0).bubble_share,
    )


def _small_bytes(config: WeftConfig, facts: Facts, split: StageSplit, held: Sequence[int]) -> float:
    tokens = config.pipeline.microbatches * config.train.microbatch_size * config.data.sequence_length
    tensors = rank_size(facts.model, split, held).tensors
    return small_bytes(tokens / facts.layout.context, tensors, on_gpu=facts.device != "cpu")


def _between_steps(config: WeftConfig, facts: Facts, split: StageSplit, held: Sequence[int]) -> float:
    """Return the bytes that a rank needs while it has no activations: for an update, or a teacher's scores."""
    size = rank_size(facts.model, split, held)
    stepped = _stepped(config, facts, size)
    found = stepping_bytes(config.optimizer, stepped, size.largest, together=facts.device != "cpu")
    if facts.teacher is None or split.num_stages - 1 not in held:
        return found
    return max(found, facts.teacher.in_line_bytes)


def _recompute(
    config: WeftConfig, facts: Facts, placement: Placement, split: StageSplit, states: Sequence[ZeroMemory]
) -> Choice:
    """Return what each virtual stage computes again: as configured, or with `auto` as `RecomputeSearch` finds."""
    kind = config.pipeline.recompute
    if kind not in (Recompute.none, Recompute.layers) and facts.recomputes:
        raise ValueError(
            f"pipeline.recompute={kind.name}: the model recomputes every layer already (gradient checkpointing); "
            "disable that, or set pipeline.recompute=layers"
        )
    if kind is not Recompute.auto:
        return (kind,) * placement.num_stages
    alone = planning_costs(config, facts, split)
    uncapped = replace(config.pipeline, memory_cap_bytes=0, jitter_samples=0)
    return RecomputeSearch(
        config,
        placement,
        activation_memory(config, alone, placement, states, facts.device_bytes),
        costs_of=cache(lambda choice: planning_costs(config, facts, split, choice)),
        schedule_of=lambda costs: plan_schedule(uncapped, placement, costs=costs),
        levels=tuple(level for level in LEVELS if not level_problem(config, level)),
    ).choose()


def _own_cap_bytes(config: WeftConfig, cell: Schedule, costs: CostModel) -> float | None:
    if cell.name != "auto" or config.pipeline.memory_cap_bytes:
        return None
    return own_cap_bytes(cell.placement, cell.num_microbatches, costs.for_cell(cell.placement.pipelines))


def settle_placement(config: WeftConfig, facts: Facts) -> Placement:
    """Return the configured placement. If several are possible, return the one with the shortest predicted step.

    Raises:
        ValueError: the model cannot be cut for any of the placements.
    """

    @cache
    def costs_of(placement: Placement) -> CostModel:
        split = split_stages(config, facts, placement)
        states = rank_states(config, facts, placement, split)
        return planning_costs(config, facts, split, _recompute(config, facts, placement, split, states))

    layout = facts.layout
    pipelines = CellMember.all(layout, config.comm.cell)[0].pipelines
    sites = layout.sites_of(layout.reference)
    placement = plan_placement(config.pipeline, sites, costs_of=costs_of, pipelines=pipelines)
    planning_costs(config, facts, split_stages(config, facts, placement))  # may not fit the model if not compared
    return placement


def split_stages(config: WeftConfig, facts: Facts, placement: Placement) -> StageSplit:
    """Return the layers of each virtual stage of a placement. Raise ValueError if the model cannot be cut for it."""
    return split_model(facts.model, placement.num_stages, config.pipeline.split, config.pipeline.layers)


def _at_sites(cell: Schedule, sites: tuple[int, ...]) -> Schedule:
    placement = cell.placement
    return cell if placement.sites == sites else replace(cell, placement=replace(placement, sites=sites))


def _on_route(costs: CostModel, facts: Facts, route: int) -> CostModel:
    return replace(costs, wan_links=facts.links.between(facts.layout.site_numbers(route)))


def _route_step_s(facts: Facts, route: int, schedules: Mapping[int, Schedule], costs: CostModel) -> float:
    """Return the seconds of a step of the slowest DP-cell on a route."""
    sites, costs = facts.layout.sites_of(route), _on_route(costs, facts, route)
    return max(cell_step_s(_at_sites(cell, sites), costs) for cell in schedules.values())


def _step_costs(costs: CostModel, overlap: OverlapPlan | None) -> CostModel:
    return costs if overlap is None else with_collectives(costs, overlap)


def _stepped(config: WeftConfig, facts: Facts, size: PartSize) -> float:
    """Return the number of weights that a rank's optimiser updates."""
    return size.trained / facts.layout.lines if config.zero.stage else size.held_trained


def _plan_overlap(
    config: WeftConfig,
    facts: Facts,
    placement: Placement,
    costs: CostModel,
    parts: Sequence[PartSize],
    states: list[ZeroMemory],
) -> OverlapPlan | None:
    """Return the three tiers' choices, or None without costs of collectives, or if partitioning is disabled."""
    if facts.collectives is None or config.zero.partition is not Partition.workload:
        return None
    work = ZeroWork(
        zero_stage=config.zero.stage,
        group=facts.replicas,
        costs=facts.collectives,
        elements=tuple(max(1, part.held_trained) for part in parts),
        gathered=tuple(part.held for part in parts) if config.zero.stage == 3 else (),
        gradient_bytes=WEIGHT_BYTES[config.zero.communication_data_type],
        weight_bytes=WEIGHT_BYTES[config.train.precision],
        memory_bytes=activation_memory(config, costs, placement, states, facts.device_bytes),
    )
    return plan_overlap(work, costs, placement, config.pipeline.microbatches)
