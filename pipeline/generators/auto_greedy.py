"""The list scheduler: each free rank starts its ready action of the highest priority."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple

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
    """The micro-batches of one stage and one kind of work, in order.

    Attributes:
        remote_need: fact from another rank that the first micro-batch needs, or NONE.
        position: index of the stage among those of its rank.
    """

    kind: int
    first_node: int
    priority_s: float
    remote_need: int
    position: int
    started: int = 0
    needs: tuple[_TaskQueue, ...] = ()  # queues of the same rank that must be ahead of this one


class _Result(NamedTuple):
    """The transfer of the result of a stage's action, as in `Problem`, and the queues that the action is taken from."""

    queues: tuple[_TaskQueue, ...]
    is_last: bool
    fact: int
    link: int
    occupancy_s: float
    pair_link: int
    transit_s: float
    latency_s: float
    receiver: int
    send_s: float


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
        count, starts = problem.num_microbatches, problem.start_bytes
        self._queues = queues = [self._of_stage(stage) for stage in range(problem.placement.num_stages)]
        for queue in (queue for of_stage in queues for queue in of_stage):
            tokens = (divmod(node // count, len(KINDS)) for node in problem.local_needs(queue.first_node))
            queue.needs = tuple(queues[stage][kind] for stage, kind in tokens)
        held_stages = problem.placement.rank_stages
        self._rank_queues = [[queue for s in held for queue in queues[s]] for held in held_stages]
        self._forwards = [[queues[s][F] for s in held] for held in held_stages]
        self._sizes = [[starts[queue.first_node] for queue in forwards] for forwards in self._forwards]
        self._results = [self._result(token) for token in range(len(queues) * len(KINDS))]
        self._arrival_s = [NEVER] * problem.num_nodes
        self._link_free_s = [0.0] * problem.num_links
        self._free_s = [0.0] * problem.num_ranks
        self._held_bytes = [0.0] * problem.num_ranks
        self._wake: list[tuple[float, int]] = [(0.0, rank) for rank in range(problem.num_ranks)]

    def _of_stage(self, stage: int) -> list[_TaskQueue]:
        """Return the queues of a stage, without their needs."""
        problem, priority_s = self.problem, self.rule.priority_s[stage]
        position = problem.placement.rank_stages[problem.placement.stage_ranks[stage]].index(stage)
        nodes = [(len(KINDS) * stage + kind) * problem.num_microbatches for kind in (F, I, W)]
        return [
            _TaskQueue(kind, nodes[kind], priority_s[kind], problem.remote_need[nodes[kind]], position)
            for kind in (F, I, W)
        ]

    def _result(self, token: int) -> _Result:
        """Return the transfer of a token's results; transfers of all micro-batches are alike."""
        problem, (stage, kind) = self.problem, divmod(token, len(KINDS))
        node, queues = token * problem.num_microbatches, self._queues[stage]
        return _Result(
            (queues[I], queues[W]) if kind == B else (queues[kind],),
            stage == 0 and kind in (I, B),
            problem.fact[node],
            problem.link[node],
            problem.occupancy_s[node],
            problem.pair_link[node],
            problem.transit_s[node],
            problem.latency_s[node],
            problem.receiver[node],
            problem.send_s[node],
        )

    def run(self) -> float:
        """Fill ``rows`` and return the makespan in seconds."""
        wake, free_s = self._wake, self._free_s
        while wake:
            now_s, rank = heappop(wake)
            if now_s >= free_s[rank]:
                chosen = self._choose(rank, now_s)
                if chosen:
                    self._start(rank, chosen, now_s)
        count = self.problem.num_microbatches
        assert all(queue.started == count for of_stage in self._queues for queue in of_stage), "stuck"
        return max(free_s)

    def _choose(self, rank: int, now_s: float) -> tuple[int, ...]:
        """Return the node or the two halves of a pair to start now; an empty tuple waits."""
        rule, count, arrival_s = self.rule, self.problem.num_microbatches, self._arrival_s
        pace_s, waits, pairs = rule.pace_s, rule.backlog != NEVER, rule.pair is not None
        chosen: _TaskQueue | None = None
        first_s = weight_s = NEVER  # lowest priorities of all that is ready, and of weight gradients
        node = weight = NONE
        ready: list[_Candidate] = []  # for pairs
        coming: list[tuple[float, float]] = []  # (start, priority) of candidates that become ready later
        for queue in self._rank_queues[rank]:
            microbatch, kind = queue.started, queue.kind
            if microbatch == count:
                continue
            for need in queue.needs:
                if need.started <= microbatch:
                    break
            else:
                start_s = now_s if queue.remote_need < 0 else arrival_s[queue.remote_need + microbatch]
                if start_s == NEVER or (kind == F and not self._admits(rank, queue)):
                    continue
                if waits and (kind == F or (kind == I and rule.backlog_of_gradients)):
                    start_s = max(start_s, self._link_has_room_s(queue.first_node + microbatch))
                priority_s = queue.priority_s + pace_s * microbatch
                if start_s > now_s:
                    coming.append((start_s, priority_s))
                    continue
                if pairs:
                    ready.append((priority_s, queue.first_node + microbatch, queue))
                if chosen is None or priority_s < first_s:
                    chosen, first_s, node = queue, priority_s, queue.first_node + microbatch
                if kind == W and (weight < 0 or priority_s < weight_s):
                    weight_s, weight = priority_s, queue.first_node + microbatch
        if chosen is None:
            return self._wait(rank, coming)
        if coming and rule.wait_share:
            latest_s = now_s + rule.wait_share * self.problem.seconds[node]
            for start_s, other_s in coming:
                if start_s < latest_s and other_s < first_s:
                    return self._wait(rank, coming)
        if pairs and chosen.kind != W:
            return self._with_partner(rank, node, chosen, ready, weight)
        return (self._fitting_backward(rank, node, weight) if chosen.kind == I else node,)

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
        sizes, position = self._sizes[rank], forward.position
        cap_bytes = self.cap_bytes
        if self._held_bytes[rank] + sizes[position] > cap_bytes:
            return False
        if len(sizes) == 1:
            return True
        if len(sizes) == 2:  # the rule below, without its lists
            first, second = self._forwards[rank]
            ahead = first.started - second.started + (-1 if position else 1)
            return ahead <= 0 or sizes[0] * ahead + sizes[1] <= cap_bytes
        done = [queue.started for queue in self._forwards[rank]]
        done[position] += 1
        for j in range(1, len(done)):
            if done[j] < done[j - 1]:
                held = sum([size * (ahead - done[j]) for size, ahead in zip(sizes[:j], done, strict=False)])
                if held + sum(sizes[j:]) > cap_bytes:
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

    def _fitting_backward(self, rank: int, node: int, weight: int) -> int:
        """Return ``node``, an input gradient; if it exceeds the cap, a weight gradient or the full backward.

        Args:
            weight: the ready weight gradient of the highest priority, or NONE.
        """
        if self._held_bytes[rank] + self.problem.start_bytes[node] <= self.cap_bytes:
            return node
        return weight if weight != NONE else node + (B - I) * self.problem.num_microbatches

    def _with_partner(
        self, rank: int, node: int, queue: _TaskQueue, ready: list[_Candidate], weight: int
    ) -> tuple[int, ...]:
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
        return (node if queue.kind == F else self._fitting_backward(rank, node, weight),)

    def _no_weights_deferred(self, gradient: _TaskQueue) -> bool:
        """True if the stage has no deferred weight gradient, so that a full backward keeps the order."""
        stage = gradient.first_node // (len(KINDS) * self.problem.num_microbatches)
        return self._queues[stage][W].started == gradient.started

    def _start(self, rank: int, nodes: tuple[int, ...], now_s: float) -> None:
        """Run a node or a pair on a free rank, and send its results."""
        problem, link_free_s, wake = self.problem, self._link_free_s, self._wake
        slot = nodes[0] if len(nodes) == 1 else problem.pair(*nodes)
        end_s = now_s + problem.seconds[slot]
        self.rows[rank].append(slot)
        self._held_bytes[rank] += problem.net_bytes[slot]
        for node in nodes:
            token, microbatch = divmod(node, problem.num_microbatches)
            (
                queues,
                is_last,
                fact,
                link,
                occupancy_s,
                pair_link,
                transit_s,
                latency_s,
                receiver,
                send_s,
            ) = self._results[token]
            for queue in queues:
                queue.started += 1
            if is_last:
                self.finished_s.append(end_s)
            sent_s = end_s
            if link >= 0:
                sent_s = max(sent_s, link_free_s[link], link_free_s[pair_link] if pair_link >= 0 else 0.0)
                link_free_s[link] = sent_s + occupancy_s
                if pair_link >= 0:
                    link_free_s[pair_link] = sent_s + transit_s
            arrival_s = sent_s + transit_s + latency_s
            self._arrival_s[fact + microbatch] = arrival_s
            if receiver >= 0:
                heappush(wake, (arrival_s, receiver))
            end_s += send_s
        self._free_s[rank] = end_s
        heappush(wake, (end_s, rank))
