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


class Channel(Protocol):
    """One direction between two ranks.

    Tags name messages for people and for transports that can deliver out of order. Both
    ends issue their calls in the same order.
    """

    def send(self, tag: str, tensor: Tensor) -> Handle:
        """Start sending ``tensor``, which must not be changed until the handle is waited for."""
        ...

    def recv(self, tag: str, spec: TensorSpec) -> Handle:
        """Start receiving a tensor of ``spec``; returns at once."""
        ...
