"""The state between the actions of one step on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor

from weft.comm.channel import SendHandle
from weft.engine.backward import SavedForward
from weft.engine.execution.label_count import LabelCount
from weft.engine.execution.receives import ReceiveQueue
from weft.engine.models.batch import Batch
from weft.engine.observability.slots import SlotObserver
from weft.pipeline.action import Action

Key = tuple[int, int]
"""(virtual stage, micro-batch)."""


def key(action: Action) -> Key:
    """Return stage and micro-batch of an action, which must have a micro-batch."""
    assert action.microbatch is not None, action
    return action.stage, action.microbatch


@dataclass(kw_only=True)
class StepState:
    """The batches, tensors and results of a step. Every dictionary of tensors is empty at the end of the step."""

    batches: Sequence[Batch]
    """Micro-batches, on the device."""
    num_items: LabelCount | None
    """Tokens that the loss is averaged over. They are still being counted when the step begins."""
    empty: Set[int] = frozenset()
    """Micro-batches without items of the loss."""
    training: bool
    """True if forwards save tensors for a backward."""
    split: Set[Key] = frozenset()
    """Forwards whose backward has two parts."""
    observers: Sequence[SlotObserver] = ()
    """Observers that are notified of the step's beginning and of every slot."""
    keep_logits: bool = False
    """True if the last stage keeps its logits (evaluation only)."""
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """Activations by the stage that will consume them."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients by the stage whose output they belong to."""
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """Activations to be sent, by the stage that has computed them."""
    input_gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients to be sent, by the stage whose input they belong to."""
    saved: dict[Key, SavedForward] = field(default_factory=dict)
    """Saved forwards, for their backwards."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Loss of each micro-batch, on the rank of the last stage."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Logits of each micro-batch, if ``keep_logits``."""
    sends: deque[SendHandle] = field(default_factory=deque)
    """Sends in progress, oldest first."""
    receives: dict[int, ReceiveQueue] = field(default_factory=dict)
    """Receives by pipeline rank of the sender."""
    done: set[Action] = field(default_factory=set)
    """Actions whose results are available on this rank. The executor's debug mode checks them."""
    hidden: list[tuple[int, Tensor]] = field(default_factory=list)
    """Smallest and largest elements of the hidden states of training forwards, each with its stage."""
    peak_bytes: int = 0
    """Highest sum of saved bytes."""
    peak_chunks: int = 0
    """Most chunk activations alive at once."""

    def note_hidden(self, stage: int, hidden: Tensor) -> None:
        """Store the smallest and the largest element of hidden states on the device. They show NaN and infinity."""
        self.hidden += [(stage, extreme) for extreme in hidden.detach().aminmax()]

    def note_peak(self) -> None:
        """Update the memory peaks from the tensors that are saved at this moment."""
        self.peak_chunks = max(self.peak_chunks, sum(saved.holds_activation for saved in self.saved.values()))
        self.peak_bytes = max(self.peak_bytes, sum(saved.live_bytes for saved in self.saved.values()))
