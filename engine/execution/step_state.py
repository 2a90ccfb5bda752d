"""The state between the actions of one step on one rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import Handle, Receiver, SendHandle, TensorSpec
from weft.comm.sums import ReplicaSum
from weft.engine.backward import SavedForward
from weft.engine.models.batch import Batch
from weft.engine.observability.watcher import SlotObserver
from weft.pipeline.action import Action


class ReceiveQueue:
    """The receives of one step from one neighbour, in the order in which it sends.

    A transport such as gloo transfers nothing before the receive is posted, and NCCL matches messages by
    order. So receives are posted in the sender's order. ``ahead`` of them are posted at any time, and more if a
    later message is needed first.
    """

    def __init__(self, channel: Receiver, messages: Sequence[tuple[Action, TensorSpec]], *, ahead: int) -> None:
        self._channel = channel
        self._unposted = deque(messages)
        self._posted: dict[Action, Handle] = {}
        self._ahead = ahead
        self._fill()

    def wait(self, action: Action) -> Tensor:
        """Return the tensor of the receive ``action``. Blocks until the tensor has arrived.

        Raises:
            ChannelError: the deadline passed, or the link broke.
        """
        while action not in self._posted:
            self._post()
        handle = self._posted.pop(action)
        self._fill()  # before the wait, during which these transfers may proceed
        return handle.wait()

    def _fill(self) -> None:
        while self._unposted and len(self._posted) < self._ahead:
            self._post()

    def _post(self) -> None:
        action, spec = self._unposted.popleft()
        self._posted[action] = self._channel.recv(str(action), spec)


NO_LABELS = "data: no token of this step carries a label; check the labels or the chat template"


class LabelCount:
    """The number of tokens that count in the loss, over all micro-batches and replicas of a step."""

    def __init__(self, count: Tensor, group: dist.ProcessGroup | None) -> None:
        """Start to sum the ``count`` of this replica, a scalar on its device."""
        exact = torch.float64 if count.device.type == "cpu" else torch.float32
        self._sum: ReplicaSum | None = ReplicaSum(count.to(exact), group)
        self.items = torch.zeros((), device=count.device)
        """The count, fp32, after `wait`."""
        self._host_count: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def is_known(self) -> bool:
        """True after `wait`."""
        return self._sum is None

    def wait(self) -> Tensor:
        """Wait for the sum, copy it to `items`, and return `items`. On a GPU only the current stream waits.

        Raises:
            ValueError: the count is zero. On a GPU, `check` raises this error instead.
        """
        if self._sum is not None:
            self.items.copy_(self._sum.wait())
            self._sum = None
            if self.items.is_cuda:
                self._copy_to_host()
            elif self.items == 0:
                raise ValueError(NO_LABELS)
        return self.items

    def _copy_to_host(self) -> None:
        """Copy the count to the host for `check`. A step without labels has a loss and gradients of zero."""
        count = torch.empty((), pin_memory=True)
        count.copy_(self.items, non_blocking=True)
        self._host_count = count, torch.cuda.current_stream(self.items.device).record_event()
        self.items.clamp_(min=1.0)

    def check(self) -> None:
        """Raise an error if the count is zero. Called one step after `wait`, this hardly blocks the host.

        Raises:
            ValueError: the step had no labels.
        """
        if self._host_count is not None:
            count, event = self._host_count
            event.synchronize()
            if count == 0:
                raise ValueError(NO_LABELS)


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
    offloaded: Set[Key] = frozenset()
    """Forwards whose saved tensors go to host memory."""
    observers: Sequence[SlotObserver] = ()
    """Observers that are notified of the step's beginning and of every slot."""
    of_logits: Callable[[Tensor, Batch], Tensor] | None = None
    """Computes the values to keep from logits and the whole micro-batch on the last stage (evaluation only)."""
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
    of_each: dict[int, Tensor] = field(default_factory=dict)
    """Result of ``of_logits`` for each micro-batch."""
    sends: deque[SendHandle] = field(default_factory=deque)
    """Sends in progress, oldest first."""
    receives: dict[int, ReceiveQueue] = field(default_factory=dict)
    """Receives by pipeline rank of the sender."""
    done: set[Action] = field(default_factory=set)
    """Actions whose results are available on this rank. The executor's debug mode checks them."""
    hidden: list[tuple[int, Tensor]] = field(default_factory=list)
    """Smallest and largest elements of hidden states, head weight and logits of training forwards, with their stage."""
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
