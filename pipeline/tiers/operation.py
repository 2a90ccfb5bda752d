"""The operation tier: how a collective is partitioned into chunks (Centauri algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

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


def operation_tier(costs: OperationCosts, *, max_chunks: int = MAX_CHUNKS) -> OperationPlan:
    """Partition a collective by algorithm 1; the comments give its line numbers."""
    inter, intra, world = costs.inter_size, costs.intra_size, costs.world_size
    num_chunks = max_chunks  # 1
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
