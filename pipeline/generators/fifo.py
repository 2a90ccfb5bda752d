"""Numbering: a stage takes its micro-batches in order, so a row needs to name stages only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.pipeline.action import Action, Op, Slot

Token = tuple[Op, int]
"""An operation and the virtual stage it works on; the micro-batch is the next in line."""


def number(slots: Iterable[tuple[Token, ...]], num_microbatches: int) -> tuple[Slot, ...]:
    """Give each token of a row the next micro-batch of its stage and operation.

    A full backward advances the input-gradient and the weight-gradient line together. Tokens
    beyond the last micro-batch are dropped, so that a recipe written for a full pipeline also
    serves fewer micro-batches. Micro-batches are alike: nothing is gained by taking those of
    one stage and operation out of order.
    """
    taken: Counter[Token] = Counter()
    row = []
    for slot in slots:
        actions = []
        for op, stage in slot:
            line = (Op.I, stage) if op is Op.B else (op, stage)
            if taken[line] < num_microbatches:
                actions.append(Action(op, stage, taken[line]))
            taken[line] += 1
            if op is Op.B:
                taken[Op.W, stage] += 1
        if actions:
            row.append(tuple(actions))
    return tuple(row)
