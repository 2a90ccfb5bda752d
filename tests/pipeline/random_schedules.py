"""Random valid schedules: any order in which no action comes before what it needs."""

from __future__ import annotations

import random

from weft.pipeline.action import Action, Op
from weft.pipeline.dependencies import dependencies, establishes
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def random_placement(rng: random.Random, num_ranks: int) -> Placement:
    """One to three legs in any direction, over one or two groups, over any sites."""
    legs = "".join(rng.choice("du") for _ in range(rng.randint(1, 3)))
    cut = rng.randint(1, num_ranks)
    groups = (cut, num_ranks - cut) if cut < num_ranks else (num_ranks,)
    return Placement(groups, legs, rng.choice([groups, (num_ranks,)]))


def random_schedule(rng: random.Random, placement: Placement, num_microbatches: int) -> Schedule:
    """Draw a random ready action of a random rank until all have been drawn.

    Backwards are split at random; some neighbouring forwards and backwards become pairs.
    """
    ranks = placement.stage_ranks
    todo = set()
    for stage in range(placement.num_stages):
        for m in range(num_microbatches):
            backward = (Op.B,) if rng.random() < 0.5 else (Op.I, Op.W)
            todo |= {Action(op, stage, m) for op in (Op.F, *backward)}
    ops = frozenset(action.op for action in todo)
    empty = Schedule("random", placement, num_microbatches, ())
    rows: list[list[tuple[Action, ...]]] = [[] for _ in range(placement.num_ranks)]
    done: set[Action] = set()

    def ready(action: Action, known: set[Action]) -> bool:
        return all(need in known for need in dependencies(action, placement, num_microbatches, ops))

    while todo:
        choices = sorted((a for a in todo if ready(a, done)), key=str)
        action = rng.choice(choices)
        slot = (action,)
        partners = [
            b
            for b in choices
            if action.op is Op.F
            and b.op in (Op.B, Op.I)
            and ranks[b.stage] == ranks[action.stage]
            and b.microbatch != action.microbatch
        ]
        if partners and rng.random() < 0.5:
            slot = (action, rng.choice(partners))
        rows[ranks[action.stage]].append(slot)
        for half in slot:
            todo.discard(half)
            done.update(establishes(half))
    return empty.with_rows(rows)
