"""The channel interface: asynchronous point-to-point transfers of tagged tensors between two ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ChannelError(RuntimeError):
    """A link failed or missed its deadline; the message names the link."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor to be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Handle(Protocol):
    """A transfer in flight."""

    def wait(self) -> Tensor:
        """Wait for the transfer and return the tensor; on a GPU only the current stream waits.

        Raises:
            ChannelError: the deadline passed, or the link broke.
        """
        ...


@dataclass(frozen=True)
class Completed:
    """Handle of an operation without communication."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


class SendHandle(Handle, Protocol):
    """The handle of a send, which can be polled."""

    def ended(self) -> bool:
        """True if the transfer is known to have completed or failed; does not block."""
        ...


class Sender(Protocol):
    """The sending end of one direction between two ranks.

    Tags identify messages in error messages and for transports that deliver out of order. Both
    ends issue their calls in the same order.
    """

    def send(self, tag: str, tensor: Tensor) -> SendHandle:
        """Start sending ``tensor``, which must not be modified before the handle's `wait` returns.

        Raises:
            ChannelError: the link has failed already.
        """
        ...


class Receiver(Protocol):
    """The receiving end."""

    def recv(self, tag: str, spec: TensorSpec) -> Handle:
        """Start receiving a tensor of ``spec`` and return at once."""
        ...


class Channel(Sender, Receiver, Protocol):
    """A channel that sends and receives."""
