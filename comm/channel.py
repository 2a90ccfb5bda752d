"""The channel: a tagged tensor moves between two ranks without blocking compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class ChannelError(RuntimeError):
    """A link did not deliver before its deadline, or broke; the message names the link."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor to be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Tensor:
        """Block until the transfer has ended, and return the tensor.

        On a GPU only the current stream waits.

        Raises:
            ChannelError: the deadline passed, or the link broke.
        """
        ...


class Transfer(Handle, Protocol):
    """A transfer that can be asked whether it is over."""

    def ended(self) -> bool:
        """Whether the transfer has ended, well or badly, as far as is known; does not block."""
        ...


class Sender(Protocol):
    """The near end of one direction between two ranks.

    Tags name messages for people and for transports that can deliver out of order. Both
    ends issue their calls in the same order.
    """

    def send(self, tag: str, tensor: Tensor) -> Transfer:
        """Start sending ``tensor``, which must not be changed until the handle is waited for.

        Raises:
            ChannelError: the link is broken already.
        """
        ...


class Receiver(Protocol):
    """The far end."""

    def recv(self, tag: str, spec: TensorSpec) -> Handle:
        """Start receiving a tensor of ``spec``; returns at once."""
        ...


class Channel(Sender, Receiver, Protocol):
    """Both directions in one."""
