"""Actions: one operation of one virtual stage on one micro-batch."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from weft.pipeline.limits import short_repr


class Op(Enum):
    """The kinds of action, named as in torch.distributed.pipelining.

    A full backward ``B`` is an input-gradient backward ``I`` followed by a weight-gradient
    backward ``W`` of the same stage and micro-batch.
    """

    F = "F"
    B = "B"
    I = "I"
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    RELAY_F = "RELAY_F"
    RELAY_B = "RELAY_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"

    # Members are singletons: identity hashing is exact, and runs in C.
    __hash__ = object.__hash__


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})
BACKWARD = frozenset({Op.B, Op.I, Op.W})
WEIGHT_USERS = frozenset({Op.F, Op.B, Op.I})
"""Computations that read the weights of their stage."""
SENDS = frozenset({Op.SEND_F, Op.SEND_B})
HOST_COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
"""Copies of a micro-batch's saved activations to host memory, and back."""
RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
RELAYS = frozenset({Op.RELAY_F, Op.RELAY_B})
STAGE_WIDE = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD, Op.STEP})
"""Operations on a whole virtual stage, without a micro-batch."""

_TEXT = re.compile(r"([0-9]{1,9})(" + "|".join(op.value for op in Op) + r")([0-9]{0,9})")


class Action(NamedTuple):
    """``op`` of virtual stage ``stage`` for ``microbatch``; text form ``2F7``.

    A ``SEND_F`` names the stage that produced the activation, a ``RECV_F`` the stage that
    consumes it; ``SEND_B`` and ``RECV_B`` do the same for gradients. A ``RELAY_F`` or ``RELAY_B``
    names the sending stage, and appears on the ranks of a DP-cell whose uplinks carry a part of
    the transfer. Stage-wide operations have ``microbatch`` None. ``STEP`` appears once per rank
    and names the rank's lowest stage: it steps the optimiser over all stages of that rank.

    The copy of an offloaded activation to the host begins when its ``F`` ends. ``OFFLOAD`` waits for the copy's end and
    frees the device's memory. ``RELOAD`` allocates it again and starts the copy back, for which the backward waits.
    """

    op: Op
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form. Raise ValueError if ``text`` is not exactly one action."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"action {short_repr(text)}: expected STAGE OP MICROBATCH such as '2F7' or '3REDUCE_GRAD'")
        op = Op(match[2])
        if (op in STAGE_WIDE) != (match[3] == ""):
            need = "no micro-batch" if op in STAGE_WIDE else "a micro-batch"
            raise ValueError(f"action {text!r}: {op.value} takes {need}")
        return cls(op, int(match[1]), int(match[3]) if match[3] else None)


_RECEIVE_OF = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


def receive_of(send: Action) -> Action:
    """Return the receive on the neighbouring stage that matches ``send``."""
    op, step = _RECEIVE_OF[send.op]
    return Action(op, send.stage + step, send.microbatch)


Slot = tuple[Action, ...]
"""An action, or a strand pair: a forward and a backward of different micro-batches.

A pair is atomic: it starts when the inputs of both halves have arrived.
"""

_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def is_pair(slot: Slot) -> bool:
    """True if a slot is a forward and a backward that both run through layers, so that they can be interleaved."""
    return len(slot) == 2 and slot[1].op in (Op.B, Op.I)


def slot_text(slot: Slot) -> str:
    """``2F7``, or ``(2F7;1B3)OVERLAP_F_B`` for a strand pair (torch's own form)."""
    return str(slot[0]) if len(slot) == 1 else f"({slot[0]};{slot[1]})OVERLAP_F_B"


def parse_slot(text: str) -> Slot:
    """Parse what ``slot_text`` writes.

    Raises:
        ValueError: ``text`` is neither an action nor a forward paired with a backward.
    """
    match = _PAIR.fullmatch(text)
    if match is None:
        return (Action.parse(text),)
    pair = (Action.parse(match[1]), Action.parse(match[2]))
    if pair[0].op is not Op.F or pair[1].op not in BACKWARD:
        raise ValueError(f"slot {short_repr(text)}: a pair is a forward and a backward, as in '(2F7;1B3)OVERLAP_F_B'")
    return pair
