"""A rank's channels to neighbouring pipeline ranks, inside a host, inside a site or over the WAN."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.channel import ChannelError, Receiver, Sender
from weft.comm.job import current_job
from weft.comm.lifeline import Lifeline
from weft.comm.links import Hop, LinkProfile, SiteNetwork
from weft.comm.rts_channel import RtsReceiver, RtsSender
from weft.comm.shared_channel import SharedReceiver, SharedSender, share
from weft.comm.torch_channel import between_hosts, connect
from weft.conf.features import entry
from weft.conf.schema import CommConfig
from weft.engine.layout import RankLayout, dp_cells, hops
from weft.pipeline.placement import Placement


def open_wan(
    placement: Placement,
    layout: RankLayout,
    comm: CommConfig,
    device: torch.device,
    *,
    known: Mapping[Hop, LinkProfile] | None = None,
) -> SiteNetwork | None:
    """Open the job's links between sites. Return None if all consecutive stages are at the same site.

    Collective call.

    Args:
        known: all profiles that an earlier attempt has measured, or None. If a rank has them, nothing is probed.
    """
    crossing = dp_cells(placement, layout, comm.cell)
    if not crossing:
        return None
    job = current_job()

    def connect() -> SiteNetwork:
        network: SiteNetwork = entry("wan").open_network(
            crossing, comm=comm, device=device, known=known or {}, address=job.address
        )
        return network

    return job.network(connect, hops(placement, layout)[1])


@dataclass(frozen=True)
class Neighbours:
    """The channels of one rank.

    Attributes:
        lifeline: detects lost ranks of GPU jobs. In CPU jobs the channels' connections detect them.
    """

    send_to: Mapping[int, Sender]
    receive_from: Mapping[int, Receiver]
    _own: Collection[Any]
    lifeline: Lifeline | None = None

    @classmethod
    def join(
        cls,
        placement: Placement,
        layout: RankLayout,
        *,
        wan: SiteNetwork | None,
        device: torch.device,
        timeout_s: float,
    ) -> Neighbours:
        """Open the channels. Collective call over the whole world.

        Args:
            wan: the links to other sites, or None. `close` closes them.
        """
        inside, between = hops(placement, layout)
        assert not between or wan is not None, "stages at several sites need `open_wan`"
        hosts = between_hosts()

        def open_inside() -> dict[Hop, Any]:
            shared, apart = share(inside, timeout_s=timeout_s)
            return shared | connect(apart, device=device, timeout_s=timeout_s, rts_group=hosts)

        channels = current_job().channels(open_inside, inside)
        own = list(channels.values())
        if wan is not None:
            channels |= wan.channels
        me = dist.get_rank()
        joined = cls(
            {layout.position(there).stage: end for (here, there), end in channels.items() if here == me},
            {layout.position(here).stage: end for (here, there), end in channels.items() if there == me},
            own,
            None if hosts is None else Lifeline(hosts),
        )
        if joined.lifeline is not None:
            joined.lifeline.on_loss = joined.interrupt
        return joined

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for transfers. It adds the lost rank to an error that the loss has caused.

        Raises:
            ChannelError: a rank is lost.
        """
        return nullcontext() if self.lifeline is None else self.lifeline.watching()

    def interrupt(self, why: ChannelError | None = None) -> None:
        """Make all waits for ranks of this site fail, from any thread. Afterwards the channels are unusable."""
        for end in self._own:
            if isinstance(end, SharedSender | SharedReceiver):
                end.interrupt()
            elif isinstance(end, RtsSender | RtsReceiver):
                end.interrupt(why or ChannelError("this rank leaves"))

    def close(self, *, leaving: bool = False) -> None:
        """Release the channels' resources. Process groups end with the job.

        Args:
            leaving: whether other ranks may have ended or keep their channels open.
        """
        for end in self._own:
            if leaving and isinstance(end, RtsSender):
                end.leave()
            else:
                end.close()
        if self.lifeline is not None:
            self.lifeline.close(leaving=leaving)
