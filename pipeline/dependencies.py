"""The dependency rule: what must have finished before an action may start."""

from __future__ import annotations

from collections.abc import Set

from weft.pipeline.action import Action, Op
from weft.pipeline.placement import Placement

_ONE = {
    Op.W: (Op.I, 0),
    Op.SEND_F: (Op.F, 0),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.I, 0),
    Op.RECV_B: (Op.SEND_B, 1),
    Op.OFFLOAD: (Op.F, 0),
    Op.RELOAD: (Op.OFFLOAD, 0),
    Op.RELAY_F: (Op.SEND_F, 0),
    Op.RELAY_B: (Op.SEND_B, 0),
}
"""The one fact that these operations depend on, and its stage relative to theirs."""


def dependencies(action: Action, placement: Placement, num_microbatches: int, ops: Set[Op]) -> tuple[Action, ...]:
    """Return the results that ``action`` waits for, each named by the action that produces it.

    The gradient with respect to a stage's input is named ``I`` and the gradient with respect to
    its weights ``W``, even if the schedule has full backwards only: see `establishes`.

    Args:
        ops: the kinds of action that the schedule contains. If it has no transfers or weight all-gathers,
            the dependency goes to the action that produces their input.
    """
    op, stage, microbatch = action
    if op in _ONE:
        needed, step = _ONE[op]
        return (Action(needed, stage + step, microbatch),)
    ranks = placement.stage_ranks
    if op is Op.F:
        needs = [Action(Op.UNSHARD, stage)] if Op.UNSHARD in ops else []
        if not placement.is_first(stage):
            moved = Op.RECV_F in ops and ranks[stage - 1] != ranks[stage]
            needs.append(Action(Op.RECV_F, stage, microbatch) if moved else Action(Op.F, stage - 1, microbatch))
        return tuple(needs)
    if op is Op.B or op is Op.I:
        needs = [Action(Op.F, stage, microbatch)]
        if Op.RESHARD in ops:
            needs.append(Action(Op.UNSHARD, stage))
        if not placement.is_last(stage):
            moved = Op.RECV_B in ops and ranks[stage + 1] != ranks[stage]
            needs.append(Action(Op.RECV_B if moved else Op.I, stage if moved else stage + 1, microbatch))
        return tuple(needs)
    if op is Op.REDUCE_GRAD:
        return tuple(Action(Op.W, stage, m) for m in range(num_microbatches))
    if op is Op.STEP:
        held = placement.rank_stages[ranks[stage]]
        if Op.REDUCE_GRAD in ops:
            return tuple(Action(Op.REDUCE_GRAD, s) for s in held)
        return tuple(Action(Op.W, s, m) for s in held for m in range(num_microbatches))
    assert op is Op.UNSHARD or op is Op.RESHARD, op
    return ()


def establishes(action: Action) -> tuple[Action, ...]:
    """Return the results that exist once ``action`` has finished: a full backward produces ``I`` and ``W``."""
    if action.op is Op.B:
        return Action(Op.I, action.stage, action.microbatch), Action(Op.W, action.stage, action.microbatch)
    return (action,)
