"""Micro-batch numbering: a stage takes micro-batches in order, so generators only name stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.pipeline.action import Action, Op, Slot

Token = tuple[Op, int]
"""An operation and its virtual stage; the micro-batch is the next in order."""


def assign_microbatches(slots: Iterable[tuple[Token, ...]], num_microbatches: int) -> tuple[Slot, ...]:
    """Assign to each token of a row, a stage and an operation, the next micro-batch of that stage and operation.

    A full backward advances both the input-gradient and the weight-gradient count. Tokens beyond
    the last micro-batch are dropped, so that a row written for a full pipeline also works for
    fewer micro-batches. Micro-batches are interchangeable, so another order would gain nothing.
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
