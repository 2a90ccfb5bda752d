"""The channel inside a site: point-to-point operations of torch.distributed (NCCL or gloo).

Each direction of each pair has a process group of its own. On gloo that is a TCP connection
of its own, so opposite transfers never take turns on one; on NCCL a communicator of its own,
so a send of one direction is never ordered behind a receive of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec


@dataclass(frozen=True)
class TorchHandle:
    """A transfer of torch.distributed; see `weft.comm.channel.Handle`."""

    work: dist.Work | Future[dist.Work]
    tensor: Tensor
    link: str
    tag: str
    timeout: timedelta

    def wait(self) -> Tensor:
        """Block until the transfer has ended, and return the tensor."""
        try:
            work = self.work.result() if isinstance(self.work, Future) else self.work
            work.wait(self.timeout)
        except RuntimeError as error:
            raise ChannelError(
                f"link {self.link}: {self.tag} did not arrive within comm.timeout_s="
                f"{self.timeout.total_seconds():g} or the peer has ended: {str(error).partition('. ')[0]}"
            ) from error
        return self.tensor

    def ended(self) -> bool:
        """Whether `wait` would return at once, as far as is known."""
        if not isinstance(self.work, Future):
            return self.work.is_completed()
        return self.work.done() and (self.work.exception() is not None or self.work.result().is_completed())


class TorchChannel:
    """One direction between this rank and ``peer``; see `weft.comm.channel.Channel`."""

    def __init__(
        self, *, peer: int, sending: bool, group: dist.ProcessGroup, device: torch.device, timeout_s: float
    ) -> None:
        """Both ranks of the pair build their end over the same ``group``.

        Args:
            peer: global rank at the other end.
            sending: whether this end sends.
        """
        self._peer = peer
        self._group = group
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        me = dist.get_rank()
        self._link = f"rank {me} -> rank {peer}" if sending else f"rank {peer} -> rank {me}"
        # gloo copies a message into the socket on the thread that starts the send: 3 to 4 ms
        # for 8 MB, which a thread of its own takes out of the way of compute.
        own_thread = sending and device.type == "cpu"
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=self._link) if own_thread else None

    def send(self, tag: str, tensor: Tensor) -> TorchHandle:
        """Start sending ``tensor``, which must not be changed until the handle is waited for."""
        tensor = tensor.contiguous()
        start = partial(dist.isend, tensor, self._peer, group=self._group)
        return self._handle(self._sender.submit(start) if self._sender else start(), tensor, tag)

    def recv(self, tag: str, spec: TensorSpec) -> TorchHandle:
        """Start receiving a tensor of ``spec``."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        return self._handle(dist.irecv(buffer, self._peer, group=self._group), buffer, tag)

    def _handle(self, work: dist.Work | Future | None, tensor: Tensor, tag: str) -> TorchHandle:
        assert work is not None, "this rank is a member of the pair's group"
        return TorchHandle(work, tensor, self._link, tag, self._timeout)


def connect(
    hops: Iterable[tuple[int, int]], *, device: torch.device, timeout_s: float
) -> dict[tuple[int, int], TorchChannel]:
    """Open the directed channels of this rank; a collective call over the whole world.

    Ranks that are not members of a hop pass it by without waiting, and disjoint hops open
    side by side.

    Args:
        hops: directed pairs (sender, receiver) of global ranks, the same set on every rank.

    Returns:
        For each hop that touches this rank, its channel.
    """
    me = dist.get_rank()
    channels = {}
    for sender, receiver in sorted(hops, key=lambda hop: (min(hop) % 2, hop)):
        # Not use_local_synchronization: torch 2.13 names such a group by its members alone,
        # so the two directions of a pair would meet under one name.
        group = dist.new_group(
            sorted((sender, receiver)), timeout=timedelta(seconds=timeout_s), group_desc=f"hop {sender} -> {receiver}"
        )
        if me in (sender, receiver):
            peer = receiver if me == sender else sender
            channels[sender, receiver] = TorchChannel(
                peer=peer, sending=me == sender, group=group, device=device, timeout_s=timeout_s
            )
    return channels
