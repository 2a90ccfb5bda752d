"""The culprit when ranks have ended: the most specific fault, or the rank that the others waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.engine.supervision.budget import Fault
from weft.engine.supervision.faults import POLICIES, FaultKind, RankEnd, Response, cause
from weft.engine.supervision.layout import Layout
from weft.engine.supervision.progress import step_under_way
from weft.engine.supervision.watch import Watch


def all_lost(ends: Mapping[int, RankEnd]) -> bool:
    """True if every end is a consequence of another rank's end, so that none shows the cause."""
    return all(end.kind is FaultKind.lost_peer for end in ends.values())


def fault_of_ends(ends: Mapping[int, RankEnd], layout: Layout, watch: Watch, now: float) -> Fault:
    """Return the fault that ends an attempt.

    Args:
        ends: by rank, at least one: the failure, or the reason for standby.
        watch: of the attempt.
    """
    rank = cause(ends)
    end = ends[rank]
    culprit = _named(end.ranks or (rank,), layout)
    evidence = end.message.splitlines()[0] if end.message else ""
    if end.kind is FaultKind.bad_numbers:
        if end.ranks:
            evidence += f" (weft evict {' '.join(_hosts(culprit))})"
        else:  # all ranks end alike, so the first is no more to blame than the others
            culprit = {}
    if all_lost(ends):
        culprit, waited = _awaited(ends, layout, watch, now)
        evidence = f"{waited}; rank {rank} says: {evidence}"
    policy = POLICIES[end.kind]
    return Fault(
        end.kind.value,
        culprit,
        evidence,
        step_under_way(watch) if end.step is None else end.step,
        now - watch.still_since,
        policy.most,
        policy.response is Response.stop,
    )


def _named(ranks: Sequence[int], layout: Layout) -> Mapping[str, Any]:
    """Return ranks with their hosts as a culprit. Ranks that the attempt does not have are omitted."""
    known = [rank for rank in ranks if 0 <= rank < layout.num_ranks]
    if len(known) == 1:
        return {"rank": known[0], "host": layout.host_of(known[0])}
    return {"ranks": known, "hosts": sorted({layout.host_of(rank) for rank in known})}


def _hosts(culprit: Mapping[str, Any]) -> Sequence[str]:
    return culprit["hosts"] if "hosts" in culprit else [culprit["host"]]


def _awaited(ends: Mapping[int, RankEnd], layout: Layout, watch: Watch, now: float) -> tuple[Mapping[str, Any], str]:
    """Return the rank that all ranks with a lost peer waited for, empty if unknown, and a description."""
    suspects = watch.awaited(ends, now)
    ranks = [suspect.rank for suspect in suspects if suspect.rank is not None]
    hosts = sorted({layout.host_of(rank) for rank in ranks})
    if len(ranks) == 1:
        text = f"the others waited for rank {ranks[0]}, {suspects[0].doing}"
        return {"rank": ranks[0], "host": hosts[0]}, text
    if len(hosts) == 1:
        return {"host": hosts[0]}, f"the others waited for ranks of {hosts[0]}"
    if not ranks and suspects:
        return {"link": list(suspects[0].links[0])}, f"what was sent did not arrive: {suspects[0].doing}"
    return {}, "ranks have lost each other"
