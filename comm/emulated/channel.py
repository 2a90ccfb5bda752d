"""The ends of a channel to an emulated neighbour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.comm.emulated.operation_log import Operation

if TYPE_CHECKING:
    from weft.comm.emulated.world import EmulatedWorld


@dataclass(frozen=True)
class Sent:
    """A completed send: the message was copied. See `weft.comm.channel.SendHandle`."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the tensor that was sent."""
        return self.tensor

    def ended(self) -> bool:
        """True: a send completes immediately."""
        return True


@dataclass(frozen=True)
class Coming:
    """A message that an emulated neighbour sends. See `weft.comm.channel.Handle`."""

    world: EmulatedWorld
    peer: int
    tag: str
    tensor: Tensor

    def wait(self) -> Tensor:
        """Wait until the message's emulated arrival time, and return zeros in its place.

        Raises:
            EmulationError: the neighbour never sends this message.
        """
        with self.world.clock.left_out():
            at_s = self.world.step.arrival_s(self.peer, self.tag)
        self.world.clock.until(at_s)
        return self.tensor


class EmulatedSender:
    """The sending end of a channel to an emulated neighbour. See `weft.comm.channel.Sender`.

    `send` copies a message once, as a send through shared memory does.
    """

    def __init__(self, world: EmulatedWorld, peer: int) -> None:
        self._world, self._peer = world, peer
        self._copies: dict[torch.Size, Tensor] = {}

    def send(self, tag: str, tensor: Tensor) -> Sent:
        """Start to send ``tensor``. Raise EmulationError if the neighbour does not expect this message."""
        self._world.recorder.record([self._peer], f"to {self._peer}", Operation(f"send {tag}", _form(tensor)))
        at_s = self._world.clock.now()
        copy = self._copies.get(tensor.shape)
        if copy is None or copy.dtype != tensor.dtype:
            copy = self._copies[tensor.shape] = torch.empty_like(tensor)
        copy.copy_(tensor)
        with self._world.clock.left_out():
            self._world.step.sent(self._peer, tag, tensor.nbytes, at_s)
        return Sent(tensor)

    def close(self) -> None:
        """Nothing to close."""


class EmulatedReceiver:
    """The receiving end of a channel from an emulated neighbour. See `weft.comm.channel.Receiver`."""

    def __init__(self, world: EmulatedWorld, peer: int) -> None:
        self._world, self._peer = world, peer

    def recv(self, tag: str, spec: TensorSpec) -> Coming:
        """Start to receive a tensor of ``spec``."""
        self._world.recorder.record([self._peer], f"from {self._peer}", Operation(f"receive {tag}", _form(spec)))
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=self._world.device)
        return Coming(self._world, self._peer, tag, tensor)

    def close(self) -> None:
        """Nothing to close."""


def _form(message: Tensor | TensorSpec) -> str:
    return f"{tuple(message.shape)} {str(message.dtype).removeprefix('torch.')}"
