"""The scheduling problem as arrays: dependencies, durations, links and bytes by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.dependencies import dependencies, establishes
from weft.pipeline.jitter import sampled_factor, sampled_s
from weft.pipeline.memory import freed_bytes, saved_bytes
from weft.pipeline.placement import Placement

KINDS = (Op.F, Op.I, Op.W, Op.B)
SPLIT = frozenset({Op.F, Op.I, Op.W})
NONE = -1
Rows = list[list[int]]
"""Nodes in order, rank by rank."""


class Durations(NamedTuple):
    """Seconds of all nodes and their transfers, by the medians or in one sample; `Problem` describes the lists."""

    seconds: list[float]
    occupancy_s: list[float]
    transit_s: list[float]
    latency_s: list[float]


class _Transfer(NamedTuple):
    """The transfer of a result to the rank that needs it; `Problem` describes the fields."""

    receiver: int = NONE
    link: int = NONE
    occupancy_s: float = 0.0
    pair_link: int = NONE
    transit_s: float = 0.0
    latency_s: float = 0.0


@dataclass
class Problem:
    """A pipeline step, compiled for speed; rows are lists of node numbers.

    A node is one action. A token is one kind of work of one stage, with number ``4 * stage + kind``, where kinds are
    F, I, W and B. Micro-batch ``m`` of a token is node ``token * M + m``. Strand pairs get higher numbers when they are
    first used. Every token takes its micro-batches in order; because micro-batches are interchangeable, this loses
    nothing. A fact is the result of a node (an activation or a gradient), named by the node number of F, I or W.

    Attributes (lists by node):
        seconds: duration on the rank.
        remote_need: the fact from another rank that must arrive first, or NONE.
        fact: the fact that the node produces (a B produces the fact of its I).
        receiver: the rank that needs the fact, or NONE.
        link: the uplink that carries the fact, or NONE; occupied for ``occupancy_s``.
        pair_link: the narrower link between the two ranks, or NONE; occupied for ``transit_s``.
        transit_s: seconds until the last byte has left; the fact arrives ``latency_s`` later.
        send_s: seconds for which starting the send occupies the rank.
        start_bytes: saved bytes that the node adds when it starts.
        net_bytes: saved bytes that remain added once it has ended; negative if it frees.
    """

    placement: Placement
    num_microbatches: int
    costs: CostModel
    until_weight: bool = False
    """Count a whole activation as saved until its weight gradient is computed."""
    tick_s: float = 0.0
    """Round times to multiples of this power of two, so that sums are exact and equal times compare
    equal. Compute takes at least one tick, so that no slot takes zero time. 0 disables rounding."""
    seconds: list[float] = field(default_factory=list)
    remote_need: list[int] = field(default_factory=list)
    fact: list[int] = field(default_factory=list)
    link: list[int] = field(default_factory=list)
    occupancy_s: list[float] = field(default_factory=list)
    pair_link: list[int] = field(default_factory=list)
    transit_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    send_s: list[float] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    start_bytes: list[float] = field(default_factory=list)
    net_bytes: list[float] = field(default_factory=list)
    samples: int = 0
    """Number of entries in ``sampled``."""
    sampled: list[Durations] = field(default_factory=list)
    """Sampled durations, by the jitter of the costs."""
    halves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pair nodes: (forward, backward)."""
    shared: frozenset[int] = frozenset()
    """Links that several ranks send over: the uplinks of a DP-cell."""

    def __post_init__(self) -> None:
        assert len(self.costs.stages) == self.placement.num_stages
        self.num_ranks = self.placement.num_ranks
        self._pair_links: dict[tuple[int, int], int] = {}
        self.nodes_per_stage = len(KINDS) * self.num_microbatches
        self._pair_nodes: dict[tuple[int, int], int] = {}
        self._local_needs: list[list[int]] = []  # by stage and kind, of micro-batch 0
        for stage in range(self.placement.num_stages):
            for op in KINDS:
                self._compile(op, stage)
        self.num_nodes = len(self.seconds)
        self.medians = Durations(self.seconds, self.occupancy_s, self.transit_s, self.latency_s)
        self.sampled += map(self._sample, range(self.samples))
        self.num_links = 3 * self.num_ranks + len(self._pair_links)
        senders: dict[int, set[int]] = {}
        for token in range(0, self.num_nodes, self.num_microbatches):
            senders.setdefault(self.link[token], set()).add(self.rank(token))
        self.shared = frozenset(link for link, ranks in senders.items() if link != NONE and len(ranks) > 1)

    def node(self, action: Action) -> int:
        """Return the node of a compute action."""
        assert action.microbatch is not None
        return (len(KINDS) * action.stage + KINDS.index(action.op)) * self.num_microbatches + action.microbatch

    def action(self, node: int) -> Action:
        """Return the action of a node that is not a pair."""
        token, microbatch = divmod(node, self.num_microbatches)
        return Action(KINDS[token % len(KINDS)], token // len(KINDS), microbatch)

    def local_needs(self, node: int) -> tuple[int, ...]:
        """Return the facts that a node needs from its own rank."""
        token, microbatch = divmod(node, self.num_microbatches)
        return tuple(need + microbatch for need in self._local_needs[token])

    def slot(self, node: int) -> Slot:
        """Return the slot of a node; a pair is one node with two actions."""
        return tuple(map(self.action, self.halves.get(node, (node,))))

    def pair(self, forward: int, backward: int) -> int:
        """Return the node of a strand pair, created at its first use."""
        if (forward, backward) not in self._pair_nodes:
            self._pair_nodes[forward, backward] = len(self.seconds)
            self.halves[len(self.seconds)] = (forward, backward)
            for seconds, *_ in (self.medians, *self.sampled):
                both_s = seconds[forward] + seconds[backward]
                seconds.append(self._compute_s(both_s * self._pair_scale(forward, backward)))
            self.start_bytes.append(self._pair_bytes(forward, backward))
            self.net_bytes.append(self.net_bytes[forward] + self.net_bytes[backward])
        return self._pair_nodes[forward, backward]

    def strand_pair(self, one: int, other: int = NONE) -> int:
        """Return the pair that two neighbours in a row can form, even if it gains nothing, or NONE."""
        alike = one % self.num_microbatches == other % self.num_microbatches
        if other == NONE or alike or max(one, other) >= self.num_nodes:
            return NONE
        kinds = self.op(one), self.op(other)
        if kinds.count(Op.F) != 1 or Op.W in kinds:
            return NONE
        forward, backward = (one, other) if kinds[0] is Op.F else (other, one)
        return self.pair(forward, backward) if self._pair_scale(forward, backward) < 1 else NONE

    def full_backward(self, one: int, other: int = NONE) -> int:
        """Return the full backward that two neighbours in a row can form, or NONE."""
        count = self.num_microbatches
        if one >= self.num_nodes or self.op(one) is not Op.I or other != one + count:
            return NONE
        return one + 2 * count

    def rank(self, node: int) -> int:
        """Return the rank that runs a node that is not a pair."""
        return self.placement.stage_ranks[node // self.num_microbatches // len(KINDS)]

    def op(self, node: int) -> Op:
        """Return the operation of a node that is not a pair."""
        return KINDS[node // self.num_microbatches % len(KINDS)]

    def facts(self, slot: int) -> tuple[int, ...]:
        """Return the facts that a slot produces, in sending order."""
        return tuple(fact for node in self.halves.get(slot, (slot,)) for fact in self._node_facts[node])

    def post_key(self, node: int) -> tuple[int, int]:
        """Return the sort key of transfers that a DP-cell posts at the same time, as in `weft.pipeline.cell`."""
        token, microbatch = divmod(node, self.num_microbatches)
        stage, kind = divmod(token, len(KINDS))
        return microbatch, 2 * stage + (KINDS[kind] is Op.F)

    def may_swap(self, first: int, second: int) -> bool:
        """Return True if two neighbours may swap.

        The second must neither need the first nor be the next micro-batch of the same token.
        """
        if max(first, second) < self.num_nodes:
            return self._row_needs[second].isdisjoint(self._node_facts[first])
        return all(
            self.may_swap(one, other)
            for one in self.halves.get(first, (first,))
            for other in self.halves.get(second, (second,))
        )

    @cached_property
    def _node_facts(self) -> list[tuple[int, ...]]:
        """The facts that each node produces, without pairs."""
        return [tuple(map(self.node, establishes(self.action(node)))) for node in range(self.num_nodes)]

    @cached_property
    def _row_needs(self) -> list[frozenset[int]]:
        """By node, without pairs: the facts that must precede it in its row."""
        return [
            frozenset(self.local_needs(node) + tuple(fact - 1 for fact in made if node % self.num_microbatches))
            for node, made in enumerate(self._node_facts)
        ]

    def rows(self, slots: Sequence[Sequence[Slot]]) -> Rows:
        """Convert a schedule's rows to node numbers."""
        return [
            [self.node(s[0]) if len(s) == 1 else self.pair(self.node(s[0]), self.node(s[1])) for s in row]
            for row in slots
        ]

    def peak_bytes(self, row: list[int]) -> float:
        """Return the most saved bytes at any time along a row."""
        level = peak = 0.0
        for slot in row:
            peak = max(peak, level + self.start_bytes[slot])
            level += self.net_bytes[slot]
        return peak

    def microbatch_bytes(self) -> list[float]:
        """Return, by rank, the bytes that one micro-batch holds after all of its forwards."""
        return [
            sum(self.start_bytes[self.node(Action(Op.F, stage, 0))] for stage in held)
            for held in self.placement.rank_stages
        ]

    @cached_property
    def least_pair_scale(self) -> float:
        """The smallest ratio of a pair's duration to the sum of its halves, or 1 if no pair gains."""
        held = self.placement.single.rank_stages  # pipelines of a cell are alike
        return min(map(self.costs.least_pair_scale, held), default=1.0)

    def _pair_bytes(self, forward: int, backward: int) -> float:
        """Return the peak bytes that a pair adds. See `held_along`."""
        if self.costs.pairs is None or self.op(backward) is not Op.B:
            return self.start_bytes[forward] + self.start_bytes[backward]
        stages = forward // self.nodes_per_stage, backward // self.nodes_per_stage
        return self.costs.pairs.held(*stages, self.start_bytes[forward], -self.net_bytes[backward])

    def _pair_scale(self, forward: int, backward: int) -> float:
        each = self.nodes_per_stage
        return self.costs.pair_scale(forward // each, backward // each, self.op(backward))

    def _compile(self, op: Op, stage: int) -> None:
        """Append one node for each micro-batch of ``op`` on ``stage`` to all lists."""
        count = self.num_microbatches
        cost = self.costs.stages[stage]
        ranks = self.placement.stage_ranks
        made = establishes(Action(op, stage, 0))[0].op
        needs = dependencies(Action(op, stage, 0), self.placement, count, SPLIT)
        remote = [need for need in needs if ranks[need.stage] != ranks[stage]]
        self._local_needs.append([self.node(need) for need in needs if ranks[need.stage] == ranks[stage]])
        assert len(remote) <= 1, remote
        fact = self.node(Action(made, stage, 0))
        remote_need = self.node(remote[0]) if remote else NONE
        transfer = self._transfer(made, stage)
        start_bytes, net_bytes = self._held_bytes(op, cost)
        self.seconds += [self._seconds(op, cost)] * count
        self.remote_need += range(remote_need, remote_need + count) if remote else [NONE] * count
        self.fact += range(fact, fact + count)
        self.link += [transfer.link] * count
        self.occupancy_s += [transfer.occupancy_s] * count
        self.pair_link += [transfer.pair_link] * count
        self.transit_s += [transfer.transit_s] * count
        self.latency_s += [transfer.latency_s] * count
        self.send_s += [0.0 if transfer.receiver == NONE else self._rounded(cost.send_s)] * count
        self.receiver += [transfer.receiver] * count
        self.start_bytes += [start_bytes] * count
        self.net_bytes += [net_bytes] * count

    def _sample(self, sample: int) -> Durations:
        actions = [*map(self.action, range(self.num_nodes))]
        ranks, sites = self.placement.stage_ranks, self.placement.rank_sites
        factors = [1.0] * self.num_nodes
        for node, (receiver, (op, stage, microbatch)) in enumerate(zip(self.receiver, actions, strict=True)):
            if receiver != NONE:
                link = self.costs.link(sites[ranks[stage]], sites[receiver])
                send = Action(Op.SEND_F if op is Op.F else Op.SEND_B, stage, microbatch)
                factors[node] = sampled_factor(link, send, sample)
        moved = [
            [self._rounded(factor * median_s) for factor, median_s in zip(factors, medians, strict=True)]
            for medians in self.medians[1:]
        ]
        return Durations([self._compute_s(sampled_s(self.costs, action, sample)) for action in actions], *moved)

    def _seconds(self, op: Op, cost: StageCost) -> float:
        if op is Op.B:
            return self._compute_s(cost.input_s) + self._compute_s(cost.weight_s)
        return self._compute_s(cost.seconds(op))

    def _rounded(self, seconds: float) -> float:
        return round(seconds / self.tick_s) * self.tick_s if self.tick_s else seconds

    def _compute_s(self, seconds: float) -> float:
        return max(self._rounded(seconds), self.tick_s)

    def _held_bytes(self, op: Op, cost: StageCost) -> tuple[float, float]:
        """Return the bytes that ``op`` saves when it starts, and those that remain saved after it ends."""
        if not self.until_weight:
            saved = saved_bytes(cost, op)
            return saved, saved - freed_bytes(cost, op)
        kept = max(cost.activation_bytes, cost.weight_saved_bytes)
        if op is Op.F:
            return kept, kept
        return 0.0, (-kept if op is Op.W or op is Op.B else 0.0)

    def _transfer(self, made: Op, stage: int) -> _Transfer:
        """Return the transfer of a stage's activation or input gradient to another rank; empty if none needs it."""
        ranks, sites = self.placement.stage_ranks, self.placement.rank_sites
        ends = {Op.F: self.placement.is_last(stage), Op.I: self.placement.is_first(stage)}
        to = stage + 1 if made is Op.F else stage - 1
        if ends.get(made, True) or ranks[to] == ranks[stage]:
            return _Transfer()
        here, there = ranks[stage], ranks[to]
        cost = self.costs.link(sites[here], sites[there])
        # The transfer is the output of the hop's lower-numbered stage, or the gradient of that output.
        num_bytes = self.costs.stages[min(stage, to)].output_bytes
        occupancy_s, transit_s = self._rounded(cost.occupancy_s(num_bytes)), self._rounded(cost.transit_s(num_bytes))
        latency_s = self._rounded(cost.latency_s)
        if not transit_s:
            return _Transfer(receiver=there, latency_s=latency_s)
        crosses = sites[here] != sites[there]
        lane = 2 if crosses else int(made is Op.I)
        each = self.num_ranks // self.placement.pipelines
        # In a DP-cell, peers share one uplink, and one link to each position of the pipeline.
        owner, peer = (here % each, there % each) if crosses and cost.sharing > 1 else (here, there)
        pair_link = NONE
        if crosses and transit_s > occupancy_s:
            pair_link = self._pair_links.setdefault((owner, peer), 3 * self.num_ranks + len(self._pair_links))
        return _Transfer(there, 3 * owner + lane, occupancy_s, pair_link, transit_s, latency_s)
