"""Memory headroom of a run with fewer replicas: a bound from its plan, without torch."""

from __future__ import annotations

import json


def shortage(plan: str, replicas: int, *, zero_stage: int) -> str:
    """Why so many replicas cannot fit into the devices' memory, for people; empty if they may.

    What ZeRO shares out over replicas is more for each of fewer; the rest is taken to stay. So a run that is
    refused would not fit, and one that is not may still run out of memory.

    Args:
        plan: text of the ``plan.json`` of the attempt before; one that cannot be read refuses nothing.
        zero_stage: of the run.
    """
    try:
        tree = json.loads(plan)
        before = len(tree["ranks"])
        free = float(tree["facts"]["device_bytes"]["value"])
        most = max(_bytes(rank, before / replicas, zero_stage) for rank in tree["memory"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""
    if replicas >= before or most <= free:
        return ""
    return f"the fullest rank needs {most / 2**30:.3g} GiB or more, and has {free / 2**30:.3g}"


def _bytes(rank: dict[str, float], times: float, zero_stage: int) -> float:
    """At least what a pipeline rank takes when each replica has so many times the share that it had."""
    whole = sum(map(float, rank.values()))
    return whole - rank["buffers"] + (times - 1) * (rank["optimizer"] if zero_stage else 0.0)
