"""The three legs of a collective over several sites: members to their leader, leaders to each other, and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.wan.channel import WanChannel, WanHandle

_TEXT_BYTES = 256
"""Maximum number of bytes of the error that a leader sends to its site; 0 bytes mean no error."""
_MOST_UNDER_WAY = 16
_TAG = 1 << 30  # tag of gloo's messages; the group's users count tags from 0


class SiteExchange:
    """Combines the bytes of all members at all sites, and returns the result to every member, one call at a time.

    The first member at a site is its leader. Two leaders exchange messages once per call. A leader's error is raised at
    all members of its site. After an error no further call is possible.

    Attributes:
        blocks: positions in the group of the members at each site, in order of the sites' numbers.
        site: this rank's site.
    """

    def __init__(
        self,
        *,
        position: int,
        sites: Sequence[int],
        inside: dist.ProcessGroup | None,
        channels: Mapping[int, WanChannel],
    ) -> None:
        """Create this member's end of the exchange.

        Args:
            position: this rank's index in the group.
            sites: the site of each member.
            inside: the group of members at this site, in order, or None if there is only one.
            channels: on a leader, the channels to the leaders of the other sites.
        """
        self.blocks = {site: [at for at, there in enumerate(sites) if there == site] for site in sorted(set(sites))}
        self.site = sites[position]
        self.position = position
        self.size = len(sites)
        self._inside, self._channels = inside, channels
        self._number = 0
        self._sent: deque[WanHandle] = deque()

    @property
    def mine(self) -> list[int]:
        """Positions of the members at this site."""
        return self.blocks[self.site]

    @property
    def others(self) -> list[int]:
        """Numbers of the other sites."""
        return [site for site in self.blocks if site != self.site]

    def run(self, data: Tensor, sizes: Sequence[int], lead: Callable[[list[Tensor]], Tensor], num_bytes: int) -> Tensor:
        """Send this rank's bytes to its site's leader, and return the result that the leader computes.

        Args:
            data: this rank's bytes, uint8. Their number is this rank's entry of ``sizes``.
            sizes: number of bytes of each member at this site.
            lead: called at the leader with the bytes of its site's members, in order. It may call `swap` once.
            num_bytes: number of bytes that ``lead`` returns.

        Returns:
            The result of ``lead``, uint8 [num_bytes].

        Raises:
            ChannelError: a link between sites has failed; it names the link, on every member of the site.
            RuntimeError: a member at this site has ended.
        """
        self._number += 1
        if self.mine[0] == self.position:
            return self._lead(data, sizes, lead, num_bytes)
        assert self._inside is not None
        if data.numel():
            self._inside.send([data], 0, _TAG).wait()
        return self._broadcast_result(torch.empty(_TEXT_BYTES + num_bytes, dtype=torch.uint8))

    def swap(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> dict[int, Tensor]:
        """Send bytes to the leaders of other sites, and return the bytes that they send.

        Args:
            outgoing: the message to each site. It must not be changed afterwards.
            incoming: number of bytes from each site.
        """
        tag = str(self._number)
        receives = {
            site: self._channels[site].recv(tag, TensorSpec((num_bytes,), torch.uint8))
            for site, num_bytes in incoming.items()
        }
        self._sent += [self._channels[site].send(tag, data) for site, data in outgoing.items()]
        while len(self._sent) > _MOST_UNDER_WAY:
            self._sent.popleft().wait()
        return {site: receive.wait() for site, receive in receives.items()}

    def _lead(
        self, mine: Tensor, sizes: Sequence[int], lead: Callable[[list[Tensor]], Tensor], num_bytes: int
    ) -> Tensor:
        result = torch.zeros(_TEXT_BYTES + num_bytes, dtype=torch.uint8)
        try:
            parts = [mine.clone()]  # a copy, because it may still be sent to other sites after the call
            for member, size in enumerate(sizes[1:], start=1):
                parts.append(torch.empty(size, dtype=torch.uint8))
                if size:
                    assert self._inside is not None
                    self._inside.recv([parts[-1]], member, _TAG).wait()
            result[_TEXT_BYTES:] = lead(parts)
        except RuntimeError as error:
            self._send_error(result, error)
            raise
        return self._broadcast_result(result)

    def _send_error(self, result: Tensor, error: RuntimeError) -> None:
        text = str(error).partition("\n")[0].encode()[:_TEXT_BYTES]
        result[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        try:
            self._broadcast(result)
        except RuntimeError:  # a member of this site may have ended
            return

    def _broadcast_result(self, result: Tensor) -> Tensor:
        self._broadcast(result)
        if result[0] and self.mine[0] != self.position:
            raise ChannelError(result[:_TEXT_BYTES].numpy().tobytes().rstrip(b"\0").decode(errors="replace"))
        return result[_TEXT_BYTES:]

    def _broadcast(self, result: Tensor) -> None:
        if self._inside is not None:
            self._inside.broadcast([result], _from_first()).wait()


def _from_first() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options
