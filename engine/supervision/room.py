"""Memory headroom of a run with fewer replicas: a bound from its plan. This module does not import torch."""

from __future__ import annotations

import json


def shortage(plan: str, replicas: int, *, zero_stage: int) -> str:
    """Return why a number of replicas cannot fit into the devices' memory, or empty if it may.

    With fewer replicas, each holds a larger shard of the optimiser's state. Other memory is assumed to be unchanged.
    This is a lower bound, so a run that passes may still run out of memory.

    Args:
        plan: text of the previous attempt's ``plan.json``. Without a readable plan the result is empty.
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
    """Return the least bytes of a pipeline rank if its shards of optimiser state grow by a factor."""
    whole = sum(map(float, rank.values()))
    return whole - rank["buffers"] + (times - 1) * (rank["optimizer"] if zero_stage else 0.0)
