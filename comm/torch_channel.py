"""The channel inside a site: point-to-point operations of torch.distributed (NCCL or gloo).

Each hop of a rank, and so each direction of a pair, has its own process group. On gloo this is a separate TCP
connection, so that opposite transfers do not share one. On NCCL it is a separate communicator, so that two crossing
sends do not wait for each other's receive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.backends import in_host_memory, on_host
from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.job import current_job
from weft.comm.links import Hop
from weft.comm.rts_channel import RtsReceiver, RtsSender, shorten_switch_interval
from weft.conf.host.threads import executor

RTS_TIMEOUT = timedelta(days=7)
"""An RTS may take as long as a step; the receiver enforces its own deadline."""


@dataclass(frozen=True)
class TorchHandle:
    """A transfer over gloo. See `weft.comm.channel.Handle`."""

    work: dist.Work | Future[dist.Work]
    tensor: Tensor
    link: str
    tag: str
    timeout: timedelta

    def wait(self) -> Tensor:
        """Block until the transfer has completed, and return the tensor."""
        try:
            work = self.work.result() if isinstance(self.work, Future) else self.work
            work.wait(self.timeout)
        except RuntimeError as error:
            raise ChannelError(
                f"link {self.link}: {self.tag} did not arrive within comm.timeout_s="
                f"{self.timeout.total_seconds():g} or the peer has exited: {str(error).partition('. ')[0]}"
            ) from error
        return self.tensor

    def ended(self) -> bool:
        """True if `wait` is known to return immediately."""
        if not isinstance(self.work, Future):
            return self.work.is_completed()
        return self.work.done() and (self.work.exception() is not None or self.work.result().is_completed())


class TorchChannel:
    """One direction between this rank and ``peer`` over gloo. See `weft.comm.channel.Channel`."""

    def __init__(self, *, peer: int, sending: bool, group: dist.ProcessGroup, timeout_s: float) -> None:
        """Create one end. Both ranks of the pair pass the same ``group``.

        Args:
            peer: global rank of the other end.
            sending: True if this end sends.
        """
        self._peer = peer
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        me = dist.get_rank()
        self._link = f"rank {me} -> rank {peer}" if sending else f"rank {peer} -> rank {me}"
        # gloo copies a message into the socket on the calling thread, 3 to 4 ms for 8 MB, so a
        # separate thread starts the sends.
        self._sender = executor(self._link) if sending else None

    def send(self, tag: str, tensor: Tensor) -> TorchHandle:
        """Start sending ``tensor``, which must not be modified before the handle's `wait` returns."""
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


def between_hosts() -> dist.ProcessGroup | None:
    """Create a gloo group over host memory for a job on GPUs. Return None for a job on CPUs. A collective call.

    It spans the whole world: with bound devices, creating a gloo group of a subset makes the other ranks of
    torch 2.13 wait for a communicator split that the members never perform.
    """
    if on_host() or dist.get_world_size() == 1:
        return None
    return dist.new_group(timeout=RTS_TIMEOUT, backend=in_host_memory(dist.get_backend()))


def connect(
    hops: Collection[Hop], *, device: torch.device, timeout_s: float, rts_group: dist.ProcessGroup | None
) -> dict[Hop, Any]:
    """Open the directed channels of this rank. A collective call over the whole world.

    Hops without a common rank share a process group, so that a rank uses each group for one hop, from
    one thread; four groups suffice for any number of pipelines. NCCL creates communicators only for
    the pairs that communicate.

    Args:
        hops: directed pairs (sender, receiver) of global ranks, the same set on every rank.
        rts_group: the result of `between_hosts`.

    Returns:
        For each hop of this rank, its end: a `Sender` or a `Receiver`.
    """
    me = dist.get_rank()
    channels: dict[Hop, Any] = {}
    groups = _groups(hops, timedelta(seconds=timeout_s))
    mine = [(hop, groups[hop]) for hop in in_color_order(hops) if me in hop]
    if hops and rts_group is not None:
        shorten_switch_interval()
        connect_pairs(mine, device)
    for hop, group in mine:
        peer, sending = (hop[1], True) if hop[0] == me else (hop[0], False)
        if rts_group is None:
            channels[hop] = TorchChannel(peer=peer, sending=sending, group=group, timeout_s=timeout_s)
        else:
            kind = RtsSender if sending else RtsReceiver
            channels[hop] = kind(peer=peer, group=group, rts_group=rts_group, device=device, timeout_s=timeout_s)
    return channels


def _groups(hops: Collection[Hop], timeout: timedelta) -> dict[Hop, dist.ProcessGroup]:
    """Return the process group of each hop of this rank. A collective call over the whole world."""
    me, colors = dist.get_rank(), edge_colors(hops)
    groups: dict[Hop, dist.ProcessGroup] = {}
    # gloo connects all members of a group to each other, NCCL only those that communicate. A group over several sites
    # could not be NCCL's.
    for ranks in components(hops) if on_host() else current_job().by_site({rank for hop in hops for rank in hop}):
        inside = {hop: color for hop, color in colors.items() if hop[0] in ranks}
        for color in sorted(set(inside.values())):
            group = dist.new_group(ranks, timeout=timeout, group_desc=f"hops {color}")
            groups |= {hop: group for hop in inside if me in hop and inside[hop] == color}
    return groups


def components(hops: Iterable[Hop]) -> list[list[int]]:
    """Return the connected components of the graph of ``hops``. Ranks ascend, components by their first rank."""
    joined: dict[int, set[int]] = {}
    for sender, receiver in hops:
        both = joined.get(sender, {sender}) | joined.get(receiver, {receiver})
        joined.update(dict.fromkeys(both, both))
    return sorted({min(ranks): sorted(ranks) for ranks in joined.values()}.values())


def connect_pairs(hops: Sequence[tuple[Hop, dist.ProcessGroup]], device: torch.device) -> None:
    """Connect every hop of this rank by sending one element over it.

    NCCL connects lazily, inside the first operation between two ranks, and that call blocks the host until the
    peer issues the matching one. Two ranks that both post a receive first would deadlock.

    Args:
        hops: each hop with its group, in an order that all ranks share, such as that of `in_color_order`.
    """
    me = dist.get_rank()
    for (sender, receiver), group in hops:
        element = torch.zeros(1, device=device)
        if me == sender:
            dist.send(element, receiver, group=group)
        elif me == receiver:
            dist.recv(element, sender, group=group)


def edge_colors(hops: Iterable[Hop]) -> dict[Hop, int]:
    """Return an edge colouring, the same on every rank: hops of one colour (0, 1, ...) have no rank in common."""
    colors: dict[Hop, int] = {}
    taken: dict[int, set[int]] = {}
    for hop in sorted(set(hops), key=lambda hop: (min(hop), max(hop), hop)):
        busy = taken.setdefault(hop[0], set()) | taken.setdefault(hop[1], set())
        colors[hop] = next(color for color in range(len(busy) + 1) if color not in busy)
        for rank in hop:
            taken[rank].add(colors[hop])
    return colors


def in_color_order(hops: Iterable[Hop]) -> list[Hop]:
    """Sort the hops by colour, so that hops without a common rank connect at the same time."""
    colors = edge_colors(hops)
    return sorted(colors, key=lambda hop: (colors[hop], hop))
