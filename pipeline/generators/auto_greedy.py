"""The list scheduler: a rank that is free takes the ready action that its rule wants most."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_problem import KINDS, Problem, Rows
from weft.pipeline.generators.auto_timing import NEVER

F, I, W, B = range(len(KINDS))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What to want: micro-batch m of a token is wanted at ``wish_s + pace_s * m``, earliest first.

    Attributes:
        wish_s: by stage, the wishes for F, I and W of micro-batch 0.
        pace_s: seconds between the wishes for two successive micro-batches.
        patience: share of an action's own time for which it is held back when a more wanted
            one is known to arrive.
        queue: transfers that a forward's own may find on its link; with more, it is held back
            (Atlas section 4.4, rule 3).
        queue_gradients: whether that goes for input gradients too.
        pair: the kind of backward, B or I, that joins a forward to form a strand pair; None
            forms no pairs.
    """

    wish_s: tuple[tuple[float, float, float], ...]
    pace_s: float
    patience: float
    queue: float = NEVER
    queue_gradients: bool = False
    pair: Op | None = None


@dataclass(slots=True)
class _Line:
    """One stage's queue of one kind of work: its micro-batches, in order."""

    kind: int
    first_node: int
    wish_s: float
    started: int = 0
    needs: tuple[_Line, ...] = ()  # lines of the same rank that must be ahead of this one


_Offer = tuple[float, int, _Line]
"""When it is wanted, the node, and its line."""
_by_wish = itemgetter(0)


class ListScheduler:
    """One pass of list scheduling under a memory cap: linear in actions, but for the event heap.

    Never above the cap (Atlas section 4.4, rule 2) and never stuck: see `_admits`.
    """

    def __init__(self, problem: Problem, rule: Rule, cap_bytes: float) -> None:
        self.problem, self.rule = problem, rule
        self.cap_bytes = cap_bytes
        self.rows: Rows = [[] for _ in range(problem.num_ranks)]
        count = problem.num_microbatches
        stages = range(problem.placement.num_stages)
        lines = [[_Line(k, (len(KINDS) * s + k) * count, rule.wish_s[s][k]) for k in (F, I, W)] for s in stages]
        for line in (line for of_stage in lines for line in of_stage):
            tokens = (divmod(node // count, len(KINDS)) for node in problem.near[line.first_node])
            line.needs = tuple(lines[stage][kind] for stage, kind in tokens)
        self._lines = lines
        self._rank_lines = [[line for s in held for line in lines[s]] for held in problem.placement.rank_stages]
        self._forwards = [[lines[s][F] for s in held] for held in problem.placement.rank_stages]
        self._arrival_s = [NEVER] * problem.num_nodes
        self._link_free_s = [0.0] * problem.num_links
        self._free_s = [0.0] * problem.num_ranks
        self._level = [0.0] * problem.num_ranks
        self._wake: list[tuple[float, int]] = [(0.0, rank) for rank in range(problem.num_ranks)]

    def run(self) -> float:
        """Fill ``rows``; returns the makespan in seconds."""
        while self._wake:
            now_s, rank = heappop(self._wake)
            if now_s >= self._free_s[rank]:
                chosen = self._choose(rank, now_s)
                if chosen:
                    self._start(rank, chosen, now_s)
        count = self.problem.num_microbatches
        assert all(line.started == count for of_stage in self._lines for line in of_stage), "stuck"
        return max(self._free_s)

    def _choose(self, rank: int, now_s: float) -> tuple[int, ...]:
        """The single node or the two halves to start now; empty to wait for what is coming."""
        ready, coming = self._offers(rank, now_s)
        if not ready:
            return self._wait(rank, coming)
        wish_s, node, line = min(ready, key=_by_wish)
        if coming:
            patient_s = now_s + self.rule.patience * self.problem.seconds[node]
            if any(start_s < patient_s and wanted_s < wish_s for start_s, wanted_s in coming):
                return self._wait(rank, coming)
        if line.kind == W or (self.rule.pair is None and line.kind == F):
            return (node,)
        if self.rule.pair is not None:
            return self._with_partner(rank, node, line, ready)
        return (self._affordable(rank, node, ready),)

    def _offers(self, rank: int, now_s: float) -> tuple[list[_Offer], list[tuple[float, float]]]:
        """What could start now, and when and how wanted what is on its way could start."""
        problem, pace_s = self.problem, self.rule.pace_s
        ready: list[_Offer] = []
        coming: list[tuple[float, float]] = []
        for line in self._rank_lines[rank]:
            microbatch = line.started
            if microbatch == problem.num_microbatches or any(need.started <= microbatch for need in line.needs):
                continue
            node = line.first_node + microbatch
            need_node = problem.waits[node]
            start_s = now_s if need_node < 0 else self._arrival_s[need_node]
            if start_s == NEVER:
                continue
            if line.kind == F and not self._admits(rank, line):
                continue
            if line.kind == F or (line.kind == I and self.rule.queue_gradients):
                start_s = max(start_s, self._link_has_room_s(node))
            wish_s = line.wish_s + pace_s * microbatch
            if start_s > now_s:
                coming.append((start_s, wish_s))
            else:
                ready.append((wish_s, node, line))
        return ready, coming

    def _wait(self, rank: int, coming: list[tuple[float, float]]) -> tuple[int, ...]:
        """Start nothing, and look again when the first of what is on its way could start."""
        if coming:
            heappush(self._wake, (min(coming)[0], rank))
        return ()

    def _admits(self, rank: int, forward: _Line) -> bool:
        """Whether a forward fits under the cap, now and for good (the banker's rule).

        Micro-batches with the same forwards done on this rank form a group. When all ahead of
        a group have left, its oldest must be able to take its remaining forwards.
        """
        at_start = self.problem.at_start
        level = self._level[rank] + at_start[forward.first_node]
        if level > self.cap_bytes:
            return False
        forwards = self._forwards[rank]
        if len(forwards) == 1:
            return True
        done = [line.started + (line is forward) for line in forwards]
        size = [at_start[line.first_node] for line in forwards]
        for j in range(1, len(done)):
            if done[j] < done[j - 1]:
                held = sum(size[i] * (done[i] - done[j]) for i in range(j))
                if held + sum(size[j:]) > self.cap_bytes:
                    return False
        return True

    def _link_has_room_s(self, node: int) -> float:
        """When an action may start without its output queueing too long."""
        problem, queue = self.problem, self.rule.queue
        link, way = problem.link[node], problem.way[node]
        if link < 0 or queue == NEVER:
            return 0.0
        free_s = self._link_free_s[link] - queue * problem.occupancy_s[node]
        if way >= 0:
            free_s = max(free_s, self._link_free_s[way] - queue * problem.transit_s[node])
        return free_s - problem.seconds[node]

    def _affordable(self, rank: int, node: int, ready: list[_Offer]) -> int:
        """An input gradient, or what has to stand in for it when its leftovers would not fit."""
        if self._level[rank] + self.problem.at_start[node] <= self.cap_bytes:
            return node
        weights = [entry for entry in ready if entry[2].kind == W]
        if weights:
            return min(weights, key=_by_wish)[1]
        return node + (B - I) * self.problem.num_microbatches

    def _with_partner(self, rank: int, node: int, line: _Line, ready: list[_Offer]) -> tuple[int, ...]:
        """The strand pair that ``node`` can form with another ready node, or ``node`` alone."""
        problem = self.problem
        partners = [entry for entry in ready if entry[2].kind == (I if line.kind == F else F)]
        if partners:
            other = min(partners, key=_by_wish)
            forward, backward = (node, other[1]) if line.kind == F else (other[1], node)
            gradient = other[2] if line.kind == F else line
            whole = self.rule.pair is Op.B and self._weights_paid(gradient)
            half = backward + (B - I) * problem.num_microbatches if whole else backward
            count = problem.num_microbatches
            peak = self._level[rank] + problem.at_start[forward] + problem.at_start[half]
            if forward % count != half % count and peak <= self.cap_bytes:
                return forward, half
        return (node if line.kind == F else self._affordable(rank, node, ready),)

    def _weights_paid(self, gradient: _Line) -> bool:
        """Whether no weight gradient of the stage is owed, so that a full backward keeps the order."""
        stage = gradient.first_node // (len(KINDS) * self.problem.num_microbatches)
        return self._lines[stage][W].started == gradient.started

    def _start(self, rank: int, nodes: tuple[int, ...], now_s: float) -> None:
        """Run a node or a pair on a free rank, and send on what it makes."""
        problem = self.problem
        slot = nodes[0] if len(nodes) == 1 else problem.pair(*nodes)
        end_s = now_s + problem.seconds[slot]
        self.rows[rank].append(slot)
        self._level[rank] += problem.in_all[slot]
        for node in nodes:
            stage, kind = divmod(node // problem.num_microbatches, len(KINDS))
            for line_kind in (I, W) if kind == B else (kind,):
                self._lines[stage][line_kind].started += 1
            sent_s = end_s
            link, way = problem.link[node], problem.way[node]
            if link >= 0:
                sent_s = max(sent_s, self._link_free_s[link], self._link_free_s[way] if way >= 0 else 0.0)
                self._link_free_s[link] = sent_s + problem.occupancy_s[node]
                if way >= 0:
                    self._link_free_s[way] = sent_s + problem.transit_s[node]
            arrival_s = sent_s + problem.transit_s[node] + problem.latency_s[node]
            self._arrival_s[problem.fact[node]] = arrival_s
            if problem.receiver[node] >= 0:
                heappush(self._wake, (arrival_s, problem.receiver[node]))
            end_s += problem.send_s[node]
        self._free_s[rank] = end_s
        heappush(self._wake, (end_s, rank))
