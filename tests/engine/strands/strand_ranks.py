"""Ranks in threads that train a tiny model's two stages for one step, with strand pairs interleaved or not."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine.parallel.members import micro_batches, whole_model
from tests.thread_ranks import run_in_threads
from weft.conf.schema import ContextExchange, ModelConfig, Partition, SplitKind, WeftConfig, ZeroConfig
from weft.engine.execution.compute import Compute
from weft.engine.execution.executor import Executor
from weft.engine.execution.step_state import LabelCount, StepState
from weft.engine.layout import RankLayout
from weft.engine.models.batch import attach_rows_of
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.communicated import close_axes, open_axes
from weft.engine.stages.cutting.context import part_of
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.strands.strand_pairs import StrandPairs
from weft.engine.strands.yielding_group import YieldPoint
from weft.engine.zero import Collectives, Sharding
from weft.pipeline.action import Op, parse_slot
from weft.pipeline.lowering import lower
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule
from weft.pipeline.strands.pairs import pair_name
from weft.pipeline.strands.plan import SegmentPlan, Step
from weft.pipeline.validation import validate

CPU = torch.device("cpu")
FULL = "0F0 1F0 0F1 1F1+1B0 0F2+0B0 0F3+1B1 1F2+0B1 1F3+1B2 0B2 1B3 0B3"
SPLIT = "0F0 1F0 0F1+1I0 1F1+0I0 1W0 0F2+1B1 0W0 1F2+0I1 0F3+1I2 0W1 1F3+0B2 1W2 1I3 0I3 0W3 1W3"
"""Pairs of every two stages, in a shorter form than `weft.pipeline.action.parse_slot` reads."""
_making = threading.Lock()  # transformers replaces functions of torch while it makes a model


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model, how ranks share it, and the order of one step."""

    model: ModelConfig
    tensor: int = 1
    context: int = 1
    exchange: ContextExchange = ContextExchange.gather
    expert: int = 1
    replicas: int = 1
    zero: int = 0
    order: str = FULL
    adjust: Callable[[Any], None] = lambda model: None
    form: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 20.0
    spoil: Callable[[dict[int, Any]], None] = lambda stages: None
    """The fault on the last rank, in its stages."""

    @property
    def world(self) -> int:
        return self.replicas * self.context * self.tensor

    @property
    def schedule(self) -> Schedule:
        """Both stages on one pipeline rank."""
        slots = [
            parse_slot(f"({word.replace('+', ';')})OVERLAP_F_B" if "+" in word else word) for word in self.order.split()
        ]
        schedule = Schedule("by hand", Placement.interleaved(1, 2), 4, (tuple(slots),))
        schedule = lower(schedule, zero_stage=self.zero)
        validate(schedule)
        return schedule


class NotingYieldPoint(YieldPoint):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def pause(self) -> None:
        if self._local.pause is not None:
            self.given.append(threading.current_thread().name)
        super().pause()


def any_plan(seed: int, length: int = 80) -> SegmentPlan:
    """Switches and weight gradients in any order."""
    steps = [Step.forward, Step.backward, Step.weight]
    return SegmentPlan(tuple(random.Random(seed).choices(steps, [4, 4, 3], k=length)))


def outcomes(case: Case, plans: list[SegmentPlan | None]) -> list[list[dict[str, Tensor]]]:
    """Losses and gradients of each rank, for each plan of all pairs; None runs their halves one after the other."""
    with_labels = micro_batches(4 * case.replicas, **case.form)
    with _making:
        model = whole_model(case.model)
        case.adjust(model)
    return run_in_threads(case.world, _train, case, model, with_labels, plans)


def _train(case: Case, model: Any, batches: list, plans: list[SegmentPlan | None]) -> list[dict[str, Tensor]]:
    layout = RankLayout((1,), case.replicas, case.context, case.tensor, case.expert)
    config = WeftConfig(zero=ZeroConfig(stage=case.zero, partition=Partition.none, reduce_bucket_size=2000))
    opened = replace(open_axes(layout.axis_groups, CPU, case.timeout_s), exchange=case.exchange)
    found = [_step(case, model, batches, layout, config, opened, plan) for plan in plans]
    close_axes(opened)
    return found


def _step(
    case: Case,
    model: Any,
    batches: list,
    layout: RankLayout,
    config: WeftConfig,
    opened: AxisGroups,
    plan: SegmentPlan | None,
) -> dict[str, Tensor]:
    yield_point = NotingYieldPoint()
    pairs = StrandPairs.open(opened, CPU, yield_point=yield_point)
    with _making:
        split = split_layers(model.config, 2, SplitKind.even)
        stages = {s.index: s for s in stages_from_model(copy.deepcopy(model), split, range(2), pairs.axes)}
    if dist.get_rank() == case.world - 1:
        case.spoil(stages)
    collectives = Collectives.open(
        layout, CPU, config.zero, cache_dir=config.data.cache_dir, timeout_s=config.comm.timeout_s
    )
    sharding = Sharding(stages.values(), config.zero, collectives)
    schedule = case.schedule
    compute = Compute(
        stages=stages, placement=schedule.placement, seed_gradient=torch.ones_like, around=sharding.around
    )
    if plan is not None:
        pairs.plans |= {pair_name(slot): plan for slot in schedule.rows[0] if len(slot) == 2}
    executor = Executor(
        rank=0,
        stages=stages,
        compute=compute,
        send_to={},
        receive_from={},
        receive_ahead=1,
        stage_wide={
            Op.UNSHARD: lambda action: sharding.unshard(action.stage),
            Op.RESHARD: lambda action: sharding.reshard(action.stage),
            Op.REDUCE_GRAD: lambda action: sharding.reduce(action.stage),
        },
        debug=True,
        pairs=pairs if plan is not None else None,
    )
    replica = layout.position(dist.get_rank()).replica
    mine = [_part(batch, opened) for batch in batches[replica :: layout.replicas]]
    state = StepState(batches=mine, training=True, num_items=LabelCount(torch.tensor(50.0), None))
    sharding.begin_step(list(schedule.actions(0)))
    try:
        executor.run(schedule, state)
        sharding.finish_gradients()
    finally:
        pairs.close()
        sharding.close()
    assert not (state.saved or state.inputs or state.gradients or state.outputs), "something is left of the step"
    assert not any(bucket.users for bucket in sharding.buckets)
    switches = sum(one != other for one, other in pairwise(yield_point.given))
    assert (switches > 4) == (plan is not None), "strands did not switch inside of layers"
    losses = {f"loss {m}": loss for m, loss in state.losses.items()}
    gradients = {
        f"gradients of {', '.join(member.name for member in bucket.members)}": bucket.gradient.clone()
        for bucket in sharding.trained
    }
    return losses | gradients


def _part(batch: Any, axes: AxisGroups) -> Any:
    part = part_of(batch, axes.context)
    attach_rows_of(part["position_ids"], batch["position_ids"])
    return part


def require_equal(case: Case, plans: list[SegmentPlan]) -> None:
    """Every plan gives what halves one after the other give, bit by bit."""
    for rank, (alone, *together) in enumerate(outcomes(case, [None, *plans])):
        assert alone
        for plan, found in zip(plans, together, strict=True):
            assert found.keys() == alone.keys()
            differing = [name for name in alone if not torch.equal(found[name], alone[name])]
            assert not differing, f"rank {rank}, plan {plan}: {differing}"
