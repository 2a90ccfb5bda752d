"""Centauri's three tiers of overlap (section 3.2), operation, layer and model, as pure functions of costs.

Names are the paper's in lower case. Costs are in seconds, or in any other common unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import ceil, isclose

MAX_CHUNKS = 8
"""Maximum number of chunks per collective; more would cost more in launches than they hide."""


@dataclass(frozen=True, kw_only=True)
class OperationCosts:
    """Inputs of algorithm 1, except ``cost_intra``, which the algorithm never uses.

    Attributes:
        comm_cost: time of the whole collective.
        in_cost: time of the compute that does not depend on the collective.
        comp_cost: time of the compute that depends on the collective.
        cost_inter: the inter-node part of the cost.
        inter_size, intra_size: nodes, and ranks per node, or 1 if the group is not partitioned.
    """

    comm_cost: float
    in_cost: float
    comp_cost: float = 0.0
    cost_inter: float = 0.0
    inter_size: int = 1
    intra_size: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self.inter_size * self.intra_size

    @property
    def is_group_partitioned(self) -> bool:
        """True if the collective is split into inter-node and intra-node parts."""
        return self.inter_size > 1 and self.intra_size > 1


@dataclass(frozen=True)
class OperationPlan:
    """The partition of a collective.

    Attributes:
        granularity: shares of the workload in launch order; they sum to 1.
        reason: explanation for people.
    """

    granularity: tuple[float, ...]
    reason: str


def operation_tier(costs: OperationCosts) -> OperationPlan:
    """Partition a collective by algorithm 1; the comments give its line numbers."""
    inter, intra, world = costs.inter_size, costs.intra_size, costs.world_size
    num_chunks = MAX_CHUNKS  # 1
    if costs.in_cost >= costs.comm_cost:  # 2, 23
        # 24-25: no need for partitioning
        return OperationPlan((1.0,), _why("independent compute covers it", costs))
    # 3-6: even workload partition
    if costs.in_cost > 0:
        num_chunks = ceil(min(costs.comm_cost / costs.in_cost, num_chunks))
    if not costs.is_group_partitioned:  # 7, 9
        return OperationPlan((1 / num_chunks,) * num_chunks, _why("no chunk outlasts independent compute", costs))
    # 8-12: uneven partition, inter-node launched first
    if costs.in_cost > costs.cost_inter:
        return _uneven(costs, [inter / world], "inter-node first: independent compute covers it")
    # 13-16: intra-node launched first
    if costs.comp_cost / inter > intra * costs.cost_inter:
        return _uneven(costs, [intra / world], "intra-node first: compute on its output covers inter-node")
    # 17-20: finer workload partition
    return _uneven(costs, [intra / world, (inter - 1) / world], "intra-node first, and inter-node cut further")


def _uneven(costs: OperationCosts, shares: list[float], reason: str) -> OperationPlan:
    rest = 1 - sum(shares)
    return OperationPlan((*shares, rest) if rest > 1e-9 else tuple(shares), _why(reason, costs))


def _why(reason: str, costs: OperationCosts) -> str:
    text = f"{reason} (comm_cost {costs.comm_cost:.3g}, in_cost {costs.in_cost:.3g}"
    return f"{text}, cost_inter {costs.cost_inter:.3g})" if costs.is_group_partitioned else f"{text})"


class First(Enum):
    """The gradient that a layer's backward computes first."""

    input_gradients = "input gradients"
    weight_gradients = "weight gradients"


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Times T(...) of equation 1 for the backward of one layer.

    Attributes:
        w_ag: all-gather of its weights (ZeRO-3).
        g_act: input gradients.
        g_w: weight gradients.
        act_ag, act_rs: tensor-parallel collectives on activations.
        g_w_rs: reduce-scatter of its weight gradients.
        others: compute that follows and depends on neither gradient.
    """

    g_act: float
    g_w: float
    g_w_rs: float
    w_ag: float = 0.0
    act_ag: float = 0.0
    act_rs: float = 0.0
    others: float = 0.0


@dataclass(frozen=True)
class LayerPlan:
    """The order of a layer's backward, with T1 (input gradients first) and T2 (weight gradients first)."""

    first: First
    t1: float
    t2: float
    reason: str

    @property
    def gains_by_input_first(self) -> bool:
        """True if computing input gradients first is strictly faster."""
        return self.t1 < self.t2 and not isclose(self.t1, self.t2)


def layer_tier(c: LayerCosts) -> LayerPlan:
    """Return the faster order by equation 1; on a tie input gradients first, because the previous stage waits."""
    t1 = c.w_ag + max(c.g_act, c.act_ag) + max(c.g_w, c.act_rs) + max(c.g_w_rs, c.others)
    t2 = c.act_ag + max(c.g_w, c.w_ag) + max(c.g_act, c.g_w_rs) + c.act_rs + c.others
    if t1 <= t2:
        return LayerPlan(First.input_gradients, t1, t2, f"T1 {t1:.3g} <= T2 {t2:.3g}: nothing gained by weights first")
    return LayerPlan(First.weight_gradients, t1, t2, f"T2 {t2:.3g} < T1 {t1:.3g}: input gradients hide the reduction")


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Inputs of equation 2 for one virtual stage.

    Attributes:
        c_ag, c_rs: all-gather of its weights, reduce-scatter of its gradients.
        c_fw, c_bw: forward and backward of one micro-batch.
        m: activation bytes that a forward saves.
        memory: bytes available for activations (M).
        mb: micro-batches per step.
    """

    c_ag: float
    c_rs: float
    c_fw: float
    c_bw: float
    m: float
    memory: float
    mb: int


@dataclass(frozen=True)
class ModelPlan:
    """Micro-batches launched together in forward (L1) and backward (L2), and the exposed communication (T)."""

    l1: int
    l2: int
    uncovered: float
    reason: str


def model_tier(c: ModelCosts) -> ModelPlan:
    """Minimise exposed communication by equation 2; on a tie take the fewest micro-batches, to save memory.

    Raises:
        ValueError: the memory does not fit a single forward, or there is no micro-batch.
    """
    if c.mb < 1 or c.m > c.memory:
        raise ValueError(f"{c.mb} micro-batches of {c.m:g} B each in {c.memory:g} B: not even one fits; free memory")
    uncovered, l1, l2 = min(_candidates(c))  # L2 grows by no more than L1 falls, so the least L1 takes the fewest
    cap = _cap(c)
    wanted = _wanted(c.c_ag, c.c_fw, c.mb) + _wanted(c.c_rs, c.c_bw, c.mb)
    limit = "memory" if cap < c.mb and l1 + l2 < wanted else "the number of micro-batches"
    reason = "all is covered" if uncovered <= 0 else f"{uncovered:.3g} stays uncovered: {limit} allows no more"
    return ModelPlan(l1, l2, uncovered, f"L1 {l1}, L2 {l2} of {c.mb}: {reason}")


def _candidates(c: ModelCosts) -> Iterator[tuple[float, int, int]]:
    """Yield (T, L1, L2) for each useful L1: up to the number that covers the all-gather."""
    cap = _cap(c)
    for l1 in range(min(_wanted(c.c_ag, c.c_fw, c.mb), cap) + 1):
        l2 = min(_wanted(c.c_rs, c.c_bw, c.mb), cap, c.mb - l1)
        yield max(c.c_ag - l1 * c.c_fw, 0.0) + max(c.c_rs - l2 * c.c_bw, 0.0), l1, l2


def _cap(c: ModelCosts) -> int:
    """Return the number of micro-batches whose activations fit into memory."""
    return c.mb if c.m * c.mb <= c.memory else int(c.memory // c.m)


def _wanted(communication: float, compute: float, most: int) -> int:
    """Return the number of micro-batches whose compute covers a collective, at most ``most``."""
    if communication <= 0:
        return 0
    return ceil(min(communication / compute, most)) if compute > 0 else most
