"""The timing of rows: the simulator's rules on node numbers, fast enough to search with."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from weft.pipeline.generators.auto_problem import NONE, Problem, Rows

NEVER = inf


@dataclass(frozen=True)
class Timing:
    """When rows run, and why then.

    Attributes:
        makespan_s: when the last rank is done.
        rank_end_s: by rank.
        end_s: by slot.
        cause: by slot, the fact for whose arrival its rank stood idle, or NONE.
        arrival_s: by fact, when it is there for whoever waits for it.
        maker: by fact, the slot that establishes it.
        ahead: by fact, the one whose transfer kept its link busy when it was made, or NONE.
    """

    makespan_s: float
    rank_end_s: list[float]
    end_s: list[float]
    cause: list[int]
    arrival_s: list[float]
    maker: list[int]
    ahead: list[int]


def time_rows(problem: Problem, rows: Rows) -> Timing | None:
    """Run rows of single nodes and pairs; None if they deadlock.

    Each rank works in row order. A link that one rank owns sends in the order in which it
    produces, so the times follow from the rows alone, without a clock: linear in the number of
    nodes. Over the uplinks of a DP-cell several ranks send, in the order of their posts as in
    `add_relays`: a post is carried when no rank can go on without it, and so none comes before.
    Needs from the same rank are the row's own business and are not looked at.
    """
    seconds, waits, fact, link, halves = problem.seconds, problem.waits, problem.fact, problem.link, problem.halves
    occupancy_s, transit_s, latency_s, way = problem.occupancy_s, problem.transit_s, problem.latency_s, problem.way
    receiver, send_s, shared, num_nodes = problem.receiver, problem.send_s, problem.shared, problem.num_nodes
    end_s, cause = [0.0] * len(seconds), [NONE] * len(seconds)
    arrival_s, maker, ahead = [NEVER] * num_nodes, [NONE] * num_nodes, [NONE] * num_nodes
    link_free_s, link_last = [0.0] * problem.num_links, [NONE] * problem.num_links
    position, clock_s = [0] * len(rows), [0.0] * len(rows)
    missing = [NONE] * len(rows)  # the fact that each rank is stuck on
    ready = list(range(len(rows)))
    posts: list[tuple[float, int, int, int]] = []  # by turn: when, which micro-batch, which node

    def carry(node: int, posted_s: float) -> None:
        """Send what a node makes, and wake up who is stuck on it."""
        made, lane, own, sent_s = fact[node], link[node], way[node], posted_s
        if lane >= 0:
            for line in (lane,) if own < 0 else (lane, own):
                if link_free_s[line] > sent_s:
                    sent_s, ahead[made] = link_free_s[line], link_last[line]
            link_free_s[lane], link_last[lane] = sent_s + occupancy_s[node], made
            if own >= 0:
                link_free_s[own], link_last[own] = sent_s + transit_s[node], made
        arrival_s[made] = sent_s + transit_s[node] + latency_s[node]
        if missing[receiver[node]] == made:
            ready.append(receiver[node])

    while ready or posts:
        if not ready:
            posted_s, _, _, node = heappop(posts)
            carry(node, posted_s)
            continue
        rank = ready.pop()
        row, now_s = rows[rank], clock_s[rank]
        for index in range(position[rank], len(row)):
            slot = row[index]
            parts = (slot,) if slot < num_nodes else halves[slot]
            start_s = now_s
            for part in parts:
                need = waits[part]
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
                    maker[fact[part]] = slot
                    if link[part] in shared:
                        heappush(posts, (now_s, *problem.turn(part), part))
                    else:
                        carry(part, now_s)
                    now_s += send_s[part]
        else:
            position[rank] = len(row)
        clock_s[rank] = now_s
    if any(position[rank] < len(row) for rank, row in enumerate(rows)):
        return None
    return Timing(max(clock_s), clock_s, end_s, cause, arrival_s, maker, ahead)
