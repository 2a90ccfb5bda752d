"""Engines that train emulated layers which ranks share, each with its own order of forwards and backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap.emulator import Machine
from benchmarks.overlap.orders import backward_then_forward, round_robin
from benchmarks.overlap.shared_layer import (
    HIDDEN,
    SharedLayer,
    SharedRank,
    SharedStage,
    first_hidden,
    micro_batches,
    shared_loss,
)
from benchmarks.peers.case import EngineCase
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.stepping import time_steps
from benchmarks.peers.weft_engine import emulated_facts, engine_of
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import (
    CommConfig,
    LrSchedule,
    OptimizerConfig,
    PairChoice,
    ParallelConfig,
    PipelineConfig,
    PlacementKind,
    ScheduleKind,
    WeftConfig,
)
from weft.engine.distributed import init_distributed
from weft.engine.initialize import PreparedRun
from weft.engine.layout import RankLayout
from weft.engine.parallel.communicated import open_axes
from weft.engine.planning.joining import join
from weft.engine.strands.facts import HANDOVER_S
from weft.engine.strands.strand_pairs import StrandPairs
from weft.engine.strands.yielding_group import YieldPoint
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.pairs import StrandCosts, plans_for
from weft.pipeline.strands.plan import SegmentPlan
from weft.pipeline.strands.segments import StageStrands, StrandPair

Order = Callable[[StrandPair], SegmentPlan]


@dataclass(frozen=True, kw_only=True)
class SharedCase:
    """A pipeline of layers that ranks share.

    Attributes:
        layer: forward, backward and weight gradients of one layer.
        table: OEF of pairs of operators.
        ranks: number of ranks of the pipeline.
        tensor: number of ranks that share each layer.
        layers: number of layers of the whole model.
        microbatches: micro-batches per step.
        steps: number of measured steps, after one that is not measured.
        timeout_s: time limit of all steps together.
    """

    layer: StrandPair
    table: OverlapTable
    ranks: int = 4
    tensor: int = 2
    layers: int = 8
    microbatches: int = 12
    steps: int = 3
    timeout_s: float = 120.0

    @property
    def plain(self) -> EngineCase:
        """The same case without the segments of layers."""
        layer = self.layer
        work = EmulatedWork(
            forward_s=layer.forward.compute_s + layer.forward.comm_s,
            input_s=layer.backward.compute_s + layer.backward.comm_s,
            weight_s=sum(weight.compute_s for weight in layer.weights),
            hidden_bytes=4 * HIDDEN,
        )
        return EngineCase(
            num_ranks=self.ranks,
            num_layers=self.layers,
            num_microbatches=self.microbatches,
            work=work,
            num_warmup=0,
            num_steps=self.steps,
        )

    def pairs(self, num_stages: int) -> StrandCosts:
        """Return the durations of pairs of virtual stages."""
        stage = StageStrands(((self.layer, self.layers // num_stages),))
        return StrandCosts((stage,) * num_stages, self.table, HANDOVER_S)

    @property
    def layout(self) -> RankLayout:
        """The layout of the ranks."""
        return RankLayout((self.ranks,), tensor=self.tensor)


@dataclass(frozen=True)
class SharedRun:
    """The measurements of one rank.

    Attributes:
        step_s: seconds of each measured step.
        losses: losses of all steps.
        most_live: maximum number of layers between the begin of their forward and the end of their input gradient.
        planned_s: step time predicted by the engine, or None if it predicts none.
    """

    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    most_live: int
    planned_s: float | None = None


@dataclass(frozen=True)
class OrderedPairs(StrandCosts):
    """Pairs whose plan is a given order instead of a searched one."""

    order: Order = round_robin

    def plan(self, forward: int, backward: int, *, weights: bool = True) -> SegmentPlan:
        """See `StrandCosts.plan`; the backward is a full one."""
        return self.order(self.stages[forward].beside(self.stages[backward]))

    def scale(self, forward: int, backward: int, *, weights: bool = True) -> float:
        """See `StrandCosts.scale`."""
        pair = self.stages[forward].beside(self.stages[backward])
        plan = self.order(pair)
        return plan.seconds(pair, self.overlap, self.handover_s) / pair.sequential_s


def weft(
    case: SharedCase, kind: str, placement: str, pairs: str, order: Order | None = None, *, chunked: bool = False
) -> SharedRun:
    """Run one rank of Weft's engine.

    Args:
        pairs: the strand pairs that run interleaved.
        order: order of their segments; None searches for one.
        chunked: True if layers overlap with their own collectives.
    """
    config = _config(case, kind, placement, pairs)
    device = join(config)
    shared: list[SharedRank] = []

    def stage(opened: PreparedRun, index: int) -> SharedStage:
        if not shared:
            yield_point = opened.pairs.runner.yield_point if isinstance(opened.pairs, StrandPairs) else YieldPoint()
            shared.append(SharedRank(Machine(case.table, runs_ahead=True), opened.axes.tensor, yield_point))
        make = partial(SharedLayer, case.layer, shared[0], chunked=chunked)
        return SharedStage(make, shared[0].group, index=index, layers=opened.plan.split.layers)

    facts = emulated_facts(case.plain, config, device)
    counts = tuple(facts.stage_costs)
    facts = replace(facts, layout=case.layout, stage_pairs={count: case.pairs(count) for count in counts})
    engine = engine_of(config, facts, device, stage, micro_batches(case.microbatches))
    costs = engine.plan.costs
    if order is not None:
        assert isinstance(engine.pairs, StrandPairs)
        assert isinstance(costs.pairs, StrandCosts)
        ordered = OrderedPairs(costs.pairs.stages, case.table, HANDOVER_S, order)
        costs = replace(costs, pairs=ordered)
        engine.pairs.plans = plans_for(engine.plan.schedules.values(), ordered, engine.plan.placement.num_stages)
    planned_s = None if chunked else engine.plan.predicted(costs=costs).step_s
    run = _run(case, engine.train_batch, shared[0], planned_s)
    engine.destroy()
    return run


def deepspeed(case: SharedCase) -> SharedRun:
    """Run one rank of DeepSpeed's 1F1B, with the same layers shared by the same groups."""
    import deepspeed
    from deepspeed.runtime.pipe.module import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    init_distributed(case.timeout_s)
    axes = open_axes(case.layout.axis_groups, torch.device("cpu"), case.timeout_s)
    shared = SharedRank(Machine(case.table, runs_ahead=True), axes.tensor, YieldPoint())
    module = PipelineModule(
        layers=[SharedLayer(case.layer, shared) for _ in range(case.layers)],
        topology=PipeModelDataParallelTopology(num_pp=case.ranks, num_mp=case.tensor, num_dp=1),
        loss_fn=shared_loss,
        partition_method="uniform",
    )
    settings = deepspeed_config(_config(case, "1f1b", "straight", "never"), dist.get_world_size())
    settings["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    settings["steps_per_print"] = 10**9
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=settings)
    data = ((first_hidden(batch["input_ids"]), torch.zeros(1)) for batch in micro_batches(case.microbatches))
    return _run(case, lambda: engine.train_batch(data), shared)


def _config(case: SharedCase, kind: str, placement: str, pairs: str) -> WeftConfig:
    config = WeftConfig(
        pipeline=PipelineConfig(
            stages=case.ranks,
            schedule=ScheduleKind[kind],
            placement=PlacementKind[placement],
            microbatches=case.microbatches,
            pairs=PairChoice[pairs],
            debug=True,
        ),
        parallel=ParallelConfig(tensor=case.tensor),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0, clip=0.0, schedule=LrSchedule.constant),
    )
    config.comm = CommConfig(timeout_s=case.timeout_s)
    return config


def _run(case: SharedCase, step: Callable[[], Tensor], shared: SharedRank, planned_s: float | None = None) -> SharedRun:
    losses: list[float] = []

    def timed() -> None:
        losses.append(float(step()))

    shared.machine.hurries = True
    timed()
    shared.machine.hurries = False
    step_s = time_steps(case.plain, timed)
    return SharedRun(step_s, tuple(losses), shared.most_live, planned_s)


@dataclass(frozen=True)
class SharedEngine:
    """An engine by its name, with a function of this module that every rank calls."""

    function: Callable[..., SharedRun]
    arguments: Mapping[str, Any] | None = None

    def __call__(self, case: SharedCase) -> SharedRun:
        """Run one rank."""
        torch.set_num_threads(1)
        return self.function(case, **self.arguments or {})


def _folded(pairs: str, order: Order | None = None) -> SharedEngine:
    return SharedEngine(weft, {"kind": "w", "placement": "fold", "pairs": pairs, "order": order})


def _alone(kind: str, placement: str, *, chunked: bool = False) -> SharedEngine:
    return SharedEngine(weft, {"kind": kind, "placement": placement, "pairs": "never", "chunked": chunked})


DEEPSPEED, PLAIN, CHUNKS, HALVES, ROUND_ROBIN, OURS = (
    "DeepSpeed 1F1B",
    "Weft 1F1B",
    "1F1B, chunks (MegaScale)",
    "W, one half after the other",
    "W, round robin (Wavelet+)",
    "W, Weft's plans",
)
ENGINES: Mapping[str, SharedEngine] = MappingProxyType(
    {
        DEEPSPEED: SharedEngine(deepspeed),
        PLAIN: _alone("1f1b", "straight"),
        CHUNKS: _alone("1f1b", "straight", chunked=True),
        "Weft auto, no pairs": _alone("auto", "fold"),
        HALVES: _folded("never"),
        "W, B then F (Megatron-LM)": _folded("always", backward_then_forward),
        ROUND_ROBIN: _folded("always", round_robin),
        OURS: _folded("always"),
    }
)
