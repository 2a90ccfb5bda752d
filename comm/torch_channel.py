"""The channel inside a site: point-to-point operations of torch.distributed (NCCL or gloo).

The hops of a rank have a process group each, also the two directions of a pair. On gloo that is a
TCP connection of its own, so opposite transfers never take turns on one; on NCCL a communicator
of its own, so that two sends that cross do not wait for each other's receive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.first_contact import Hop, in_turn, meet_pairs, on_host, turns
from weft.comm.noted_channel import NotedReceiver, NotedSender, give_way_often

NOTES_TIMEOUT = timedelta(days=7)
"""A note may wait for as long as a step lasts; whoever waits for one has a deadline of its own."""


@dataclass(frozen=True)
class TorchHandle:
    """A transfer of gloo; see `weft.comm.channel.Handle`."""

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
    """One direction between this rank and ``peer`` over gloo; see `weft.comm.channel.Channel`."""

    def __init__(self, *, peer: int, sending: bool, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Both ranks of the pair build their end over the same ``group``.

        Args:
            peer: global rank at the other end.
            sending: whether this end sends.
        """
        self._peer = peer
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        me = dist.get_rank()
        self._link = f"rank {me} -> rank {peer}" if sending else f"rank {peer} -> rank {me}"
        # gloo copies a message into the socket on the thread that starts the send: 3 to 4 ms
        # for 8 MB, which a thread of its own takes out of the way of compute.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix=self._link) if sending else None

    def send(self, tag: str, tensor: Tensor) -> TorchHandle:
        """Start sending ``tensor``, which must not be changed until the handle is waited for."""
        tensor = tensor.contiguous()
        assert self._sender is not None, "this end receives"
        return self._handle(
            self._sender.submit(partial(dist.isend, tensor, self._peer, group=self._group)), tensor, tag
        )

    def recv(self, tag: str, spec: TensorSpec) -> TorchHandle:
        """Start receiving a tensor of ``spec``."""
        buffer = torch.empty(spec.shape, dtype=spec.dtype)
        return self._handle(dist.irecv(buffer, self._peer, group=self._group), buffer, tag)

    def close(self) -> None:
        """Accept no more sends."""
        if self._sender is not None:
            self._sender.shutdown(wait=False)

    def _handle(self, work: dist.Work | Future | None, tensor: Tensor, tag: str) -> TorchHandle:
        assert work is not None, "this rank is a member of the pair's group"
        return TorchHandle(work, tensor, self._link, tag, self._timeout)


def connect(hops: Collection[Hop], *, device: torch.device, timeout_s: float) -> dict[Hop, Any]:
    """Open the directed channels of this rank; a collective call over the whole world.

    Hops without a common rank share a process group, of which a rank then uses one hop alone, from
    one thread: four groups for any number of pipelines. NCCL makes communicators in them for the
    pairs that talk, and for no others.

    Args:
        hops: directed pairs (sender, receiver) of global ranks, the same set on every rank.

    Returns:
        For each hop that touches this rank, its end: a `Sender` or a `Receiver`.
    """
    me = dist.get_rank()
    channels: dict[Hop, Any] = {}
    groups = _groups(hops, timedelta(seconds=timeout_s))
    notes = None
    if hops and not on_host():
        # Of the whole world: for a gloo group of some ranks, torch 2.13 lets the others of a job that has bound
        # its devices wait for a split that the members never make.
        notes = dist.new_group(timeout=NOTES_TIMEOUT, backend="gloo")
    mine = [(hop, groups[hop]) for hop in in_turn(hops) if me in hop]
    if notes is not None:
        give_way_often()
        meet_pairs(mine, device)
    for hop, group in mine:
        peer, sending = (hop[1], True) if hop[0] == me else (hop[0], False)
        if notes is None:
            channels[hop] = TorchChannel(peer=peer, sending=sending, group=group, timeout_s=timeout_s)
        else:
            kind = NotedSender if sending else NotedReceiver
            channels[hop] = kind(peer=peer, group=group, notes=notes, device=device, timeout_s=timeout_s)
    return channels


def _groups(hops: Collection[Hop], timeout: timedelta) -> dict[Hop, dist.ProcessGroup]:
    """The process group of each hop of this rank; a collective call over the whole world."""
    me, numbers = dist.get_rank(), turns(hops)
    groups: dict[Hop, dist.ProcessGroup] = {}
    # gloo connects all members of a group to each other, NCCL those that talk.
    for ranks in components(hops) if on_host() else [sorted({rank for hop in hops for rank in hop})]:
        inside = {hop: number for hop, number in numbers.items() if hop[0] in ranks}
        for number in sorted(set(inside.values())):
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"hops {number}")
            groups |= {hop: group for hop in inside if me in hop and inside[hop] == number}
    return groups


def components(hops: Iterable[Hop]) -> list[list[int]]:
    """Ranks that reach each other over ``hops``, ascending, by their first."""
    joined: dict[int, set[int]] = {}
    for sender, receiver in hops:
        both = joined.get(sender, {sender}) | joined.get(receiver, {receiver})
        joined.update(dict.fromkeys(both, both))
    return sorted({min(ranks): sorted(ranks) for ranks in joined.values()}.values())
