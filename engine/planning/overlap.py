"""The overlap plan: Centauri's three tiers for the collectives of ZeRO, stage by stage. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from weft.comm.collectives import Choice, Collective, CollectiveCosts, Group, LinkClass, Primitive, choose
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.placement import Placement
from weft.pipeline.tiers import (
    LayerCosts,
    LayerPlan,
    ModelCosts,
    ModelPlan,
    OperationCosts,
    OperationPlan,
    layer_tier,
    model_tier,
    operation_tier,
)

WHOLE = ((1.0,),)
"""One chunk, with which the operation tier starts."""


@dataclass(frozen=True, kw_only=True)
class ZeroWork:
    """The state and traffic that ZeRO shards over a pipeline's replicas.

    Attributes:
        zero_stage: 0 to 3.
        group: the replicas of a virtual stage.
        costs: costs of collectives over that group.
        elements: number of trained weights of each virtual stage.
        gathered: number of weights of each virtual stage that are gathered, or empty if it equals ``elements``.
        gradient_bytes, weight_bytes: size of one element.
        memory_bytes: limit of saved activations on a rank, for all of its stages together.
    """

    zero_stage: int
    group: Group
    costs: CollectiveCosts
    elements: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    gradient_bytes: int = 4
    weight_bytes: int = 4
    memory_bytes: float = inf


@dataclass(frozen=True)
class OverlappedCollective:
    """The implementation of a virtual stage's collective, and the chunks that its buffer is divided into."""

    choice: Choice
    chunks: OperationPlan


@dataclass(frozen=True)
class StageOverlap:
    """The decisions of the three tiers for one virtual stage.

    Attributes:
        reduce: reduction of the gradients: a reduce-scatter, or at ZeRO stage 0 an all-reduce.
        gather: all-gather of the weights. At ZeRO stage 0 there is none, and it takes no time.
    """

    stage: int
    reduce: OverlappedCollective
    gather: OverlappedCollective
    layer: LayerPlan
    model: ModelPlan

    @property
    def cuts(self) -> tuple[float, ...]:
        """Ends of the stage's buckets, as fractions of its weights.

        A bucket is reduced and gathered as a whole, so the finer plan of the two is used: gathers are
        launched front to back, reductions back to front.
        """
        ahead, behind = self.gather.chunks.granularity, self.reduce.chunks.granularity[::-1]
        return tuple(accumulate((ahead if len(ahead) > len(behind) else behind)[:-1]))

    def lines(self) -> Iterator[str]:
        """Yield the decisions with their reasons."""
        for name, transfer in (("gradients", self.reduce), ("weights", self.gather)):
            if transfer.choice.cost_s:
                yield f"stage {self.stage}, {name}: {transfer.choice.rewrite}: {transfer.choice.reason}"
                yield f"  operation tier: {_shares(transfer.chunks.granularity)}: {transfer.chunks.reason}"
        if self.cuts:
            yield f"  buckets end at {', '.join(f'{cut:.3g}' for cut in self.cuts)} of the weights"
        yield f"  layer tier: {self.layer.first.value} first: {self.layer.reason}"
        yield f"  model tier: {self.model.reason}"


@dataclass(frozen=True)
class OverlapPlan:
    """The decisions of the three tiers for a run: `weft plan` prints them, the engine executes them.

    Attributes:
        stages: the decisions for every virtual stage.
        together: number of micro-batches of a stage to launch in a row: the largest number that a stage needs,
            and at least the number of pipeline ranks.
        memory_bytes: limit of saved activations on a rank.
    """

    stages: tuple[StageOverlap, ...]
    together: int
    memory_bytes: float = inf

    @property
    def cuts(self) -> dict[int, tuple[float, ...]]:
        """`StageOverlap.cuts` by virtual stage."""
        return {plan.stage: plan.cuts for plan in self.stages}

    @property
    def input_first(self) -> frozenset[int]:
        """Stages whose backward should compute input gradients first, because the previous stage waits for them."""
        return frozenset(plan.stage for plan in self.stages if plan.stage > 0 and plan.layer.gains_by_input_first)

    def lines(self) -> Iterator[str]:
        """Yield the decisions with their reasons."""
        for plan in self.stages:
            yield from plan.lines()
        yield f"{self.together} micro-batches launched together cover the most, with schedule=interleaved"


def plan_overlap(work: ZeroWork, costs: CostModel, placement: Placement, num_microbatches: int) -> OverlapPlan:
    """Return every virtual stage's plan, and the number of micro-batches that are launched together.

    A collective is hidden by its rank's computations just before its result is needed. The forward of the previous
    stage on that rank (none for the first) hides the gather. The backward of the next stage in the backward's order
    hides the reduction. Both count for all micro-batches that the model tier launches together.

    Raises:
        ValueError: a primitive was not measured on a class of link, or a single micro-batch
            exceeds the memory.
    """
    held = placement.rank_stages
    plans = []
    for stage in range(placement.num_stages):
        mine = held[placement.stage_ranks[stage]]
        before = costs.stages[mine[mine.index(stage) - 1]] if stage != mine[0] else None
        share = replace(work, memory_bytes=work.memory_bytes / len(mine))
        plans.append(_plan_stage(share, stage, costs.stages[stage], before, num_microbatches))
    wanted = max(max(plan.model.l1, plan.model.l2) for plan in plans)
    together = min(max(wanted, placement.num_ranks), max(num_microbatches, placement.num_ranks))
    return OverlapPlan(tuple(plans), together, work.memory_bytes)


def with_collectives(costs: CostModel, plan: OverlapPlan) -> CostModel:
    """Return the costs including each stage's reduction and gather, for the simulator."""
    stages = [
        replace(cost, reduce_s=plan.reduce.choice.cost_s, unshard_s=plan.gather.choice.cost_s)
        for cost, plan in zip(costs.stages, plan.stages, strict=True)
    ]
    return replace(costs, stages=tuple(stages))


def _plan_stage(
    work: ZeroWork, stage: int, cost: StageCost, before: StageCost | None, num_microbatches: int
) -> StageOverlap:
    backward_s = cost.input_s + cost.weight_s
    primitive = Primitive.reduce_scatter if work.zero_stage else Primitive.all_reduce
    reduce = _choose(work, primitive, work.elements[stage], work.gradient_bytes)
    gathered = (work.gathered or work.elements)[stage]
    gather = _choose(work, Primitive.all_gather, gathered, work.weight_bytes if work.zero_stage else 0)
    model = model_tier(
        ModelCosts(
            c_ag=gather.cost_s,
            c_rs=reduce.cost_s,
            c_fw=cost.forward_s,
            c_bw=backward_s,
            m=cost.activation_bytes,
            memory=work.memory_bytes,
            mb=num_microbatches,
        )
    )
    forward_before = before.forward_s * max(model.l1, 1) if before else 0.0
    backward_after = (before.input_s + before.weight_s) * max(model.l2, 1) if before else 0.0
    layer = layer_tier(
        LayerCosts(
            g_act=cost.input_s,
            g_w=cost.weight_s,
            g_w_rs=reduce.cost_s,
            w_ag=gather.cost_s if work.zero_stage == 3 else 0.0,
            others=backward_after,
        )
    )
    return StageOverlap(
        stage,
        OverlappedCollective(reduce, _cut(reduce, work, in_cost=backward_after, comp_cost=0.0)),
        OverlappedCollective(gather, _cut(gather, work, in_cost=forward_before, comp_cost=cost.forward_s)),
        layer,
        model,
    )


def _choose(work: ZeroWork, primitive: Primitive, elements: int, itemsize: int) -> Choice:
    padded = -(-elements // work.group.size) * work.group.size
    return choose(Collective.flat(primitive, work.group, num_elements=padded, itemsize=itemsize), work.costs)


def _cut(choice: Choice, work: ZeroWork, *, in_cost: float, comp_cost: float) -> OperationPlan:
    rewrite = choice.rewrite
    inter_s = sum(
        seconds
        for step, seconds in zip(rewrite.steps, work.costs.steps_s(rewrite), strict=True)
        if rewrite.mesh.links[step.axis] is LinkClass.inter
    )
    sizes = dict(zip(rewrite.mesh.links, rewrite.mesh.shape, strict=True))
    return operation_tier(
        OperationCosts(
            comm_cost=choice.cost_s,
            in_cost=in_cost,
            comp_cost=comp_cost,
            cost_inter=inter_s,
            inter_size=sizes.get(LinkClass.inter, 1),
            intra_size=sizes.get(LinkClass.intra, 1),
        )
    )


def _shares(granularity: tuple[float, ...]) -> str:
    count = len(granularity)
    return "1 chunk" if count == 1 else f"{count} chunks of {', '.join(f'{share:.3g}' for share in granularity)}"
