"""The list scheduler: each free rank starts its ready action of the highest priority."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

from weft.pipeline.action import Op
from weft.pipeline.generators.auto_problem import KINDS, NONE, Problem, Rows
from weft.pipeline.generators.auto_timing import NEVER

F, I, W, B = range(len(KINDS))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A priority rule: the ready action with the smallest ``priority_s + pace_s * microbatch`` goes first.

    Attributes:
        priority_s: by stage, the priorities of F, I and W of micro-batch 0.
        pace_s: difference in priority between successive micro-batches.
        wait_share: how long to wait for an action of higher priority that will soon become ready,
            as a share of the ready action's duration.
        backlog: maximum number of transfers in the queue of a forward's link; with more, the forward
            waits (Atlas section 4.4, rule 3).
        backlog_of_gradients: True if the limit applies to input gradients too.
        pair: the kind of backward, B or I, that joins a forward to form a strand pair; None
            forms no pairs.
    """

    priority_s: tuple[tuple[float, float, float], ...]
    pace_s: float
    wait_share: float
    backlog: float = NEVER
    backlog_of_gradients: bool = False
    pair: Op | None = None


@dataclass(slots=True)
class _TaskQueue:
    """The micro-batches of one stage and one kind of work, in order."""

    kind: int
    first_node: int
    priority_s: float
    started: int = 0
    needs: tuple[_TaskQueue, ...] = ()  # queues of the same rank that must be ahead of this one


_Candidate = tuple[float, int, _TaskQueue]
"""Priority, node and queue."""
_by_priority = itemgetter(0)


class ListScheduler:
    """A pass of list scheduling under a memory cap; its time is linear in the actions, except for the event heap.

    It never exceeds the cap (Atlas section 4.4, rule 2) and never deadlocks: see `_admits`.
    """

    def __init__(self, problem: Problem, rule: Rule, cap_bytes: float) -> None:
        self.problem, self.rule = problem, rule
        self.cap_bytes = cap_bytes
        self.rows: Rows = [[] for _ in range(problem.num_ranks)]
        self.finished_s: list[float] = []  # when each micro-batch's gradient has come back to the first stage
        count = problem.num_microbatches
        stages = range(problem.placement.num_stages)
        queues = [
            [_TaskQueue(k, (len(KINDS) * s + k) * count, rule.priority_s[s][k]) for k in (F, I, W)] for s in stages
        ]
        for queue in (queue for of_stage in queues for queue in of_stage):
            tokens = (divmod(node // count, len(KINDS)) for node in problem.local_needs(queue.first_node))
            queue.needs = tuple(queues[stage][kind] for stage, kind in tokens)
        self._queues = queues
        self._rank_queues = [[queue for s in held for queue in queues[s]] for held in problem.placement.rank_stages]
        self._forwards = [[queues[s][F] for s in held] for held in problem.placement.rank_stages]
        self._arrival_s = [NEVER] * problem.num_nodes
        self._link_free_s = [0.0] * problem.num_links
        self._free_s = [0.0] * problem.num_ranks
        self._held_bytes = [0.0] * problem.num_ranks
        self._wake: list[tuple[float, int]] = [(0.0, rank) for rank in range(problem.num_ranks)]

    def run(self) -> float:
        """Fill ``rows`` and return the makespan in seconds."""
        while self._wake:
            now_s, rank = heappop(self._wake)
            if now_s >= self._free_s[rank]:
                chosen = self._choose(rank, now_s)
                if chosen:
                    self._start(rank, chosen, now_s)
        count = self.problem.num_microbatches
        assert all(queue.started == count for of_stage in self._queues for queue in of_stage), "stuck"
        return max(self._free_s)

    def _choose(self, rank: int, now_s: float) -> tuple[int, ...]:
        """Return the node or the two halves of a pair to start now; an empty tuple waits."""
        ready, coming = self._candidates(rank, now_s)
        if not ready:
            return self._wait(rank, coming)
        priority_s, node, queue = min(ready, key=_by_priority)
        if coming:
            latest_s = now_s + self.rule.wait_share * self.problem.seconds[node]
            if any(start_s < latest_s and other_s < priority_s for start_s, other_s in coming):
                return self._wait(rank, coming)
        if queue.kind == W or (self.rule.pair is None and queue.kind == F):
            return (node,)
        if self.rule.pair is not None:
            return self._with_partner(rank, node, queue, ready)
        return (self._fitting_backward(rank, node, ready),)

    def _candidates(self, rank: int, now_s: float) -> tuple[list[_Candidate], list[tuple[float, float]]]:
        """Return the candidates that can start now, and (start, priority) of the candidates that become ready later."""
        count, remote_need, arrival_s = self.problem.num_microbatches, self.problem.remote_need, self._arrival_s
        waits = self.rule.backlog != NEVER
        ready: list[_Candidate] = []
        coming: list[tuple[float, float]] = []
        for queue in self._rank_queues[rank]:
            microbatch, kind = queue.started, queue.kind
            if microbatch == count:
                continue
            for need in queue.needs:
                if need.started <= microbatch:
                    microbatch = count
            if microbatch == count:
                continue
            node = queue.first_node + microbatch
            start_s = now_s if remote_need[node] < 0 else arrival_s[remote_need[node]]
            if start_s == NEVER or (kind == F and not self._admits(rank, queue)):
                continue
            if waits and (kind == F or (kind == I and self.rule.backlog_of_gradients)):
                start_s = max(start_s, self._link_has_room_s(node))
            priority_s = queue.priority_s + self.rule.pace_s * microbatch
            if start_s > now_s:
                coming.append((start_s, priority_s))
            else:
                ready.append((priority_s, node, queue))
        return ready, coming

    def _wait(self, rank: int, coming: list[tuple[float, float]]) -> tuple[int, ...]:
        """Start nothing, and wake the rank when the next candidate becomes ready."""
        if coming:
            heappush(self._wake, (min(coming)[0], rank))
        return ()

    def _admits(self, rank: int, forward: _TaskQueue) -> bool:
        """True if a forward fits under the cap now and cannot deadlock later (banker's algorithm).

        Micro-batches with the same forwards done on this rank form a group. Once all micro-batches
        ahead of a group have finished, the group's oldest must fit its remaining forwards.
        """
        start_bytes = self.problem.start_bytes
        held_bytes = self._held_bytes[rank] + start_bytes[forward.first_node]
        if held_bytes > self.cap_bytes:
            return False
        forwards = self._forwards[rank]
        if len(forwards) == 1:
            return True
        done = [queue.started + (queue is forward) for queue in forwards]
        size = [start_bytes[queue.first_node] for queue in forwards]
        for j in range(1, len(done)):
            if done[j] < done[j - 1]:
                held = sum(size[i] * (done[i] - done[j]) for i in range(j))
                if held + sum(size[j:]) > self.cap_bytes:
                    return False
        return True

    def _link_has_room_s(self, node: int) -> float:
        """Return when an action may start so that at most ``rule.backlog`` transfers are ahead of its output."""
        problem, backlog = self.problem, self.rule.backlog
        link, pair_link = problem.link[node], problem.pair_link[node]
        if link < 0:
            return 0.0
        free_s = self._link_free_s[link] - backlog * problem.occupancy_s[node]
        if pair_link >= 0:
            free_s = max(free_s, self._link_free_s[pair_link] - backlog * problem.transit_s[node])
        return free_s - problem.seconds[node]

    def _fitting_backward(self, rank: int, node: int, ready: list[_Candidate]) -> int:
        """Return ``node``, an input gradient; if it exceeds the cap, a weight gradient or the full backward."""
        if self._held_bytes[rank] + self.problem.start_bytes[node] <= self.cap_bytes:
            return node
        weights = [entry for entry in ready if entry[2].kind == W]
        if weights:
            return min(weights, key=_by_priority)[1]
        return node + (B - I) * self.problem.num_microbatches

    def _with_partner(self, rank: int, node: int, queue: _TaskQueue, ready: list[_Candidate]) -> tuple[int, ...]:
        """Return ``node`` and the ready node that can form a strand pair with it; only ``node`` if there is none."""
        problem = self.problem
        partners = [entry for entry in ready if entry[2].kind == (I if queue.kind == F else F)]
        if partners:
            other = min(partners, key=_by_priority)
            forward, backward = (node, other[1]) if queue.kind == F else (other[1], node)
            gradient = other[2] if queue.kind == F else queue
            whole = self.rule.pair is Op.B and self._no_weights_deferred(gradient)
            half = backward + (B - I) * problem.num_microbatches if whole else backward
            pair = problem.strand_pair(forward, half)
            if pair != NONE and self._held_bytes[rank] + problem.start_bytes[pair] <= self.cap_bytes:
                return forward, half
        return (node if queue.kind == F else self._fitting_backward(rank, node, ready),)

    def _no_weights_deferred(self, gradient: _TaskQueue) -> bool:
        """True if the stage has no deferred weight gradient, so that a full backward keeps the order."""
        stage = gradient.first_node // (len(KINDS) * self.problem.num_microbatches)
        return self._queues[stage][W].started == gradient.started

    def _start(self, rank: int, nodes: tuple[int, ...], now_s: float) -> None:
        """Run a node or a pair on a free rank, and send its results."""
        problem = self.problem
        slot = nodes[0] if len(nodes) == 1 else problem.pair(*nodes)
        end_s = now_s + problem.seconds[slot]
        self.rows[rank].append(slot)
        self._held_bytes[rank] += problem.net_bytes[slot]
        for node in nodes:
            stage, kind = divmod(node // problem.num_microbatches, len(KINDS))
            for queue_kind in (I, W) if kind == B else (kind,):
                self._queues[stage][queue_kind].started += 1
            if stage == 0 and kind in (I, B):
                self.finished_s.append(end_s)
            sent_s = end_s
            link, pair_link = problem.link[node], problem.pair_link[node]
            if link >= 0:
                sent_s = max(sent_s, self._link_free_s[link], self._link_free_s[pair_link] if pair_link >= 0 else 0.0)
                self._link_free_s[link] = sent_s + problem.occupancy_s[node]
                if pair_link >= 0:
                    self._link_free_s[pair_link] = sent_s + problem.transit_s[node]
            arrival_s = sent_s + problem.transit_s[node] + problem.latency_s[node]
            self._arrival_s[problem.fact[node]] = arrival_s
            if problem.receiver[node] >= 0:
                heappush(self._wake, (arrival_s, problem.receiver[node]))
            end_s += problem.send_s[node]
        self._free_s[rank] = end_s
        heappush(self._wake, (end_s, rank))
