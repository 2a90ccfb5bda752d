"""Time rows by the simulator's rules, on node numbers: fast enough for the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from statistics import fmean

from weft.pipeline.generators.auto_problem import NONE, Durations, Problem, Rows

NEVER = inf


@dataclass(frozen=True)
class Timing:
    """The time of each slot, and the fact that it waited for.

    Attributes:
        makespan_s: when the last rank ends.
        rank_end_s: by rank, when its row ends.
        end_s: by slot, when it ends.
        cause: by slot, the fact whose arrival its idle rank waited for, or NONE.
        arrival_s: by fact, when it arrives at its consumer.
        producer: by fact, the slot that produces it.
        blocked_by: by fact, the fact whose transfer still occupied the link, or NONE.
    """

    makespan_s: float
    rank_end_s: list[float]
    end_s: list[float]
    cause: list[int]
    arrival_s: list[float]
    producer: list[int]
    blocked_by: list[int]


def time_rows(problem: Problem, rows: Rows, durations: Durations | None = None) -> Timing | None:
    """Return the times of rows of single nodes and pairs, or None if they deadlock.

    Each rank works in row order. A link with one sender carries facts in the order in which they are produced, so times
    follow from the rows without an event queue, in time linear in the number of nodes. In a DP-cell several ranks send
    over pooled uplinks, in the order of their posts as in `add_relays`. A post is sent once no rank can advance without
    it, so no earlier post can follow. Dependencies within a rank are not checked: row order must satisfy them.

    Nodes and transfers take ``durations``, one of ``problem.sampled``, or by default ``problem.medians``.
    """
    p, (seconds, occupancy_s, transit_s, latency_s) = problem, durations or problem.medians
    remote_need, fact, link, pair_link, halves = p.remote_need, p.fact, p.link, p.pair_link, p.halves
    receiver, send_s, shared, num_nodes = p.receiver, p.send_s, p.shared, p.num_nodes
    end_s, cause = [0.0] * len(seconds), [NONE] * len(seconds)
    arrival_s, producer, blocked_by = [NEVER] * num_nodes, [NONE] * num_nodes, [NONE] * num_nodes
    link_free_s, last_fact = [0.0] * problem.num_links, [NONE] * problem.num_links
    position, clock_s, ready = [0] * len(rows), [0.0] * len(rows), list(range(len(rows)))
    missing = [NONE] * len(rows)  # the fact that each rank waits for
    posts: list[tuple[float, int, int, int]] = []  # heap of (time, *post_key, node)

    def send(node: int, posted_s: float) -> None:
        """Send a node's fact, and resume the rank that waits for it."""
        made, uplink, pair, sent_s = fact[node], link[node], pair_link[node], posted_s
        if uplink >= 0:
            for resource in (uplink,) if pair < 0 else (uplink, pair):
                if link_free_s[resource] > sent_s:
                    sent_s, blocked_by[made] = link_free_s[resource], last_fact[resource]
            link_free_s[uplink], last_fact[uplink] = sent_s + occupancy_s[node], made
            if pair >= 0:
                link_free_s[pair], last_fact[pair] = sent_s + transit_s[node], made
        arrival_s[made] = sent_s + transit_s[node] + latency_s[node]
        if missing[receiver[node]] == made:
            ready.append(receiver[node])

    while ready or posts:
        if not ready:
            posted_s, _, _, node = heappop(posts)
            send(node, posted_s)
            continue
        rank = ready.pop()
        row, now_s = rows[rank], clock_s[rank]
        for index in range(position[rank], len(row)):
            slot = row[index]
            parts = (slot,) if slot < num_nodes else halves[slot]
            start_s = now_s
            for part in parts:
                need = remote_need[part]
                if need >= 0 and arrival_s[need] > start_s:
                    start_s, cause[slot] = arrival_s[need], need
                    if start_s == NEVER:
                        missing[rank], cause[slot] = need, NONE
                        break
            if start_s == NEVER:
                position[rank] = index
                break
            end_s[slot] = now_s = start_s + seconds[slot]
            for part in parts:
                if receiver[part] >= 0:
                    producer[fact[part]] = slot
                    if link[part] in shared:
                        heappush(posts, (now_s, *problem.post_key(part), part))
                    else:
                        send(part, now_s)
                    now_s += send_s[part]
        else:
            position[rank] = len(row)
        clock_s[rank] = now_s
    has_ended = all(position[rank] == len(row) for rank, row in enumerate(rows))
    return Timing(max(clock_s), clock_s, end_s, cause, arrival_s, producer, blocked_by) if has_ended else None


def mean_s(problem: Problem, rows: Rows, sampled: Sequence[Durations]) -> float:
    """Return the mean makespan over sampled durations. Rows must not deadlock."""
    timings = [time_rows(problem, rows, durations) for durations in sampled]
    return fmean(timing.makespan_s for timing in timings if timing is not None)
