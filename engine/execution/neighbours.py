"""A rank's channels to the pipeline ranks next to it, whatever lies between: memory, a site's network, the WAN."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.channel import Receiver, Sender
from weft.comm.shared_channel import share
from weft.comm.torch_channel import connect
from weft.comm.wan.network import Hop, WanNetwork
from weft.engine.planning.crossings import hops
from weft.pipeline.placement import Placement


@dataclass(frozen=True)
class Neighbours:
    """The channels of one rank.

    Attributes:
        send_to: by pipeline rank of this replica.
        receive_from: the same, the other way.
    """

    send_to: Mapping[int, Sender]
    receive_from: Mapping[int, Receiver]
    _own: Collection[Any]

    @classmethod
    def join(
        cls, placement: Placement, num_replicas: int, *, wan: WanNetwork | None, device: torch.device, timeout_s: float
    ) -> Neighbours:
        """Open the channels; a collective call over the whole world.

        Args:
            wan: holds those to other sites, where there are any; it closes them.
        """
        inside, between = hops(placement, num_replicas)
        assert not between or wan is not None, "stages at several sites need `open_wan`"
        shared, apart = share(inside, timeout_s=timeout_s)
        channels: dict[Hop, Any] = shared | connect(apart, device=device, timeout_s=timeout_s)
        own = list(channels.values())
        if wan is not None:
            channels |= wan.channels
        me = dist.get_rank()
        return cls(
            {receiver // num_replicas: end for (sender, receiver), end in channels.items() if sender == me},
            {sender // num_replicas: end for (sender, receiver), end in channels.items() if receiver == me},
            own,
        )

    def close(self) -> None:
        """Give back what these channels hold; process groups end with the job."""
        for end in self._own:
            end.close()
