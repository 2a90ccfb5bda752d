"""The scheduling problem in numbers: dependencies, durations, links and bytes by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.costs import CostModel, StageCost
from weft.pipeline.dependencies import dependencies, establishes
from weft.pipeline.memory import freed_bytes_of, saved_bytes
from weft.pipeline.placement import Placement

KINDS = (Op.F, Op.I, Op.W, Op.B)
SPLIT = frozenset({Op.F, Op.I, Op.W})
NONE = -1
Rows = list[list[int]]
"""Nodes in order, rank by rank."""


class _Way(NamedTuple):
    """How a fact reaches the rank that needs it; see `Problem` for the fields."""

    receiver: int = NONE
    link: int = NONE
    occupancy_s: float = 0.0
    own: int = NONE
    transit_s: float = 0.0
    latency_s: float = 0.0


@dataclass
class Problem:
    """One pipeline step, compiled for speed; rows are lists of node numbers.

    Node ``token * M + m`` is micro-batch ``m`` of token ``4 * stage + kind`` with kinds F, I,
    W and B; strand pairs are numbered after them as they are met. Micro-batches are alike, so
    every token takes them in order: each schedule has an equal one that does.

    All lists are by node: ``seconds``; ``waits``, the fact made on another rank that must
    arrive first (or NONE); ``near``, the facts needed from the same rank; ``fact``, what it
    establishes (B establishes its I's); ``link``, the resource that carries the fact away
    (or NONE), for ``occupancy_s``; ``way``, what limits this pair of ranks besides (or NONE);
    ``transit_s`` on both until it has left, and ``latency_s`` on top; ``send_s``, for which
    starting this holds the rank; ``receiver``, the rank that waits for it (or NONE).
    """

    placement: Placement
    num_microbatches: int
    costs: CostModel
    until_weight: bool = False
    """Count a whole activation as saved until its weight gradient is done."""
    tick_s: float = 0.0
    """Times are rounded to multiples of this power of two, so that their sums are exact and ties
    are ties; what a rank computes takes at least one, so that no two slots wait for each other
    in no time. 0 leaves times as they are."""
    seconds: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    near: list[tuple[int, ...]] = field(default_factory=list)
    fact: list[int] = field(default_factory=list)
    link: list[int] = field(default_factory=list)
    occupancy_s: list[float] = field(default_factory=list)
    way: list[int] = field(default_factory=list)
    transit_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    send_s: list[float] = field(default_factory=list)
    receiver: list[int] = field(default_factory=list)
    at_start: list[float] = field(default_factory=list)
    in_all: list[float] = field(default_factory=list)
    halves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Pair nodes: (forward, backward)."""
    shared: frozenset[int] = frozenset()
    """Links that several ranks send over: the uplinks of a DP-cell."""

    def __post_init__(self) -> None:
        assert len(self.costs.stages) == self.placement.num_stages
        self.num_ranks = self.placement.num_ranks
        self._ways: dict[tuple[int, int], int] = {}
        self.nodes_per_stage = len(KINDS) * self.num_microbatches
        self._pair_nodes: dict[tuple[int, int], int] = {}
        for stage in range(self.placement.num_stages):
            for op in KINDS:
                self._compile(op, stage)
        self.num_nodes = len(self.seconds)
        self.num_links = 3 * self.num_ranks + len(self._ways)
        senders: dict[int, set[int]] = {}
        for token in range(0, self.num_nodes, self.num_microbatches):
            senders.setdefault(self.link[token], set()).add(self.rank(token))
        self.shared = frozenset(link for link, ranks in senders.items() if link != NONE and len(ranks) > 1)

    def node(self, action: Action) -> int:
        """The node of a compute action."""
        assert action.microbatch is not None
        return (len(KINDS) * action.stage + KINDS.index(action.op)) * self.num_microbatches + action.microbatch

    def action(self, node: int) -> Action:
        """The action of a single node."""
        token, microbatch = divmod(node, self.num_microbatches)
        return Action(KINDS[token % len(KINDS)], token // len(KINDS), microbatch)

    def slot(self, node: int) -> Slot:
        """The slot of a node, pairs included."""
        return tuple(map(self.action, self.halves.get(node, (node,))))

    def pair(self, forward: int, backward: int) -> int:
        """The node of a strand pair; numbered at its first use."""
        if (forward, backward) not in self._pair_nodes:
            self._pair_nodes[forward, backward] = len(self.seconds)
            self.halves[len(self.seconds)] = (forward, backward)
            both_s = self.seconds[forward] + self.seconds[backward]
            self.seconds.append(self._computed(both_s * self.costs.pair_scale))
            self.at_start.append(self.at_start[forward] + self.at_start[backward])
            self.in_all.append(self.in_all[forward] + self.in_all[backward])
        return self._pair_nodes[forward, backward]

    def strands(self, one: int, other: int = NONE) -> int:
        """The pair that two neighbours in a row can form, or NONE."""
        alike = one % self.num_microbatches == other % self.num_microbatches
        if other == NONE or alike or max(one, other) >= self.num_nodes:
            return NONE
        kinds = self.op(one), self.op(other)
        if kinds.count(Op.F) != 1 or Op.W in kinds:
            return NONE
        return self.pair(one, other) if kinds[0] is Op.F else self.pair(other, one)

    def whole(self, one: int, other: int = NONE) -> int:
        """The full backward that two neighbours in a row can form, or NONE."""
        count = self.num_microbatches
        if one >= self.num_nodes or self.op(one) is not Op.I or other != one + count:
            return NONE
        return one + 2 * count

    def rank(self, node: int) -> int:
        """The rank that runs a single node."""
        return self.placement.stage_ranks[node // self.num_microbatches // len(KINDS)]

    def op(self, node: int) -> Op:
        """The operation of a single node."""
        return KINDS[node // self.num_microbatches % len(KINDS)]

    def facts(self, slot: int) -> tuple[int, ...]:
        """What a slot establishes, in the order in which it is sent."""
        return tuple(fact for node in self.halves.get(slot, (slot,)) for fact in self._made[node])

    def turn(self, node: int) -> tuple[int, int]:
        """What decides between posts of a DP-cell at one time, as in `weft.pipeline.cell`."""
        token, microbatch = divmod(node, self.num_microbatches)
        stage, kind = divmod(token, len(KINDS))
        return microbatch, 2 * stage + (KINDS[kind] is Op.F)

    def may_swap(self, first: int, second: int) -> bool:
        """Whether neighbours of a row may change places: the second neither needs the first nor follows it in line."""
        if max(first, second) < self.num_nodes:
            return self._behind[second].isdisjoint(self._made[first])
        return all(
            self.may_swap(one, other)
            for one in self.halves.get(first, (first,))
            for other in self.halves.get(second, (second,))
        )

    @cached_property
    def _made(self) -> list[tuple[int, ...]]:
        """By single node, the facts that it establishes."""
        return [tuple(map(self.node, establishes(self.action(node)))) for node in range(self.num_nodes)]

    @cached_property
    def _behind(self) -> list[frozenset[int]]:
        """By single node, the facts of its own rank that must be ahead of it in the row."""
        return [
            frozenset(self.near[node] + tuple(fact - 1 for fact in made if node % self.num_microbatches))
            for node, made in enumerate(self._made)
        ]

    def rows(self, slots: Sequence[Sequence[Slot]]) -> Rows:
        """The node rows of a schedule's rows."""
        return [
            [self.node(s[0]) if len(s) == 1 else self.pair(self.node(s[0]), self.node(s[1])) for s in row]
            for row in slots
        ]

    def peak_bytes(self, row: list[int]) -> float:
        """Most saved bytes along a row."""
        level = peak = 0.0
        for slot in row:
            peak = max(peak, level + self.at_start[slot])
            level += self.in_all[slot]
        return peak

    def microbatch_bytes(self) -> list[float]:
        """Per rank, what one micro-batch holds once all of its forwards are done."""
        return [
            sum(self.at_start[self.node(Action(Op.F, stage, 0))] for stage in held)
            for held in self.placement.rank_stages
        ]

    def _compile(self, op: Op, stage: int) -> None:
        """Append the nodes of one token."""
        count = self.num_microbatches
        cost = self.costs.stages[stage]
        ranks = self.placement.stage_ranks
        made = establishes(Action(op, stage, 0))[0].op
        needs = dependencies(Action(op, stage, 0), self.placement, count, SPLIT)
        far = [need for need in needs if ranks[need.stage] != ranks[stage]]
        near = [self.node(need) for need in needs if ranks[need.stage] == ranks[stage]]
        assert len(far) <= 1, far
        fact = self.node(Action(made, stage, 0))
        waits = self.node(far[0]) if far else NONE
        way = self._way(made, stage)
        at_start, in_all = self._held_bytes(op, cost)
        self.seconds += [self._seconds(op, cost)] * count
        self.waits += range(waits, waits + count) if far else [NONE] * count
        self.near += [tuple(n + m for n in near) for m in range(count)]
        self.fact += range(fact, fact + count)
        self.link += [way.link] * count
        self.occupancy_s += [way.occupancy_s] * count
        self.way += [way.own] * count
        self.transit_s += [way.transit_s] * count
        self.latency_s += [way.latency_s] * count
        self.send_s += [0.0 if way.receiver == NONE else self._whole(cost.send_s)] * count
        self.receiver += [way.receiver] * count
        self.at_start += [at_start] * count
        self.in_all += [in_all] * count

    def _seconds(self, op: Op, cost: StageCost) -> float:
        if op is Op.B:
            return self._computed(cost.input_s) + self._computed(cost.weight_s)
        return self._computed(cost.seconds(op))

    def _whole(self, seconds: float) -> float:
        return round(seconds / self.tick_s) * self.tick_s if self.tick_s else seconds

    def _computed(self, seconds: float) -> float:
        return max(self._whole(seconds), self.tick_s)

    def _held_bytes(self, op: Op, cost: StageCost) -> tuple[float, float]:
        """Saved bytes more from when ``op`` starts, and more once it has ended."""
        if not self.until_weight:
            saved = saved_bytes(cost, op)
            return saved, saved - freed_bytes_of(cost, op)
        kept = max(cost.activation_bytes, cost.weight_saved_bytes)
        if op is Op.F:
            return kept, kept
        return 0.0, (-kept if op is Op.W or op is Op.B else 0.0)

    def _way(self, made: Op, stage: int) -> _Way:
        """A fact's way to the rank that needs it."""
        ranks, sites = self.placement.stage_ranks, self.placement.rank_sites
        ends = {Op.F: self.placement.is_last(stage), Op.I: self.placement.is_first(stage)}
        to = stage + 1 if made is Op.F else stage - 1
        if ends.get(made, True) or ranks[to] == ranks[stage]:
            return _Way()
        here, there = ranks[stage], ranks[to]
        cost = self.costs.link(sites[here], sites[there])
        # What travels is the output of the stage on the hop's upper side, or its gradient.
        num_bytes = self.costs.stages[min(stage, to)].output_bytes
        occupancy_s, transit_s = self._whole(cost.occupancy_s(num_bytes)), self._whole(cost.transit_s(num_bytes))
        latency_s = self._whole(cost.latency_s)
        if not transit_s:
            return _Way(receiver=there, latency_s=latency_s)
        crosses = sites[here] != sites[there]
        lane = 2 if crosses else int(made is Op.I)
        each = self.num_ranks // self.placement.pipelines
        # The uplinks of a DP-cell are one, and so are its ways from one place to another.
        owner, peer = (here % each, there % each) if crosses and cost.sharing > 1 else (here, there)
        own = NONE
        if crosses and transit_s > occupancy_s:
            own = self._ways.setdefault((owner, peer), 3 * self.num_ranks + len(self._ways))
        return _Way(there, 3 * owner + lane, occupancy_s, own, transit_s, latency_s)
