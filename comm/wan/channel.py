"""The WAN channel and its transfers: tensors cut into pieces, over one path or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.wan.staging import Staging
from weft.comm.wan.transport import Path, State, Transport

_TAG_BYTES = 48
_SMALL_BYTES = 64 << 10  # not worth more than one path
_PIECES = 4  # of a share, unless they would be small or large
_LEAST_PIECE_BYTES = 16 << 10
_POLL_S = 0.2  # so that Ctrl-C is heard


@dataclass(frozen=True, kw_only=True)
class WanChannel:
    """Tensors to and from one peer, in order within a tag; see `weft.comm.channel.Channel`.

    A tensor travels in pieces over one or several paths, the same ones at both ends.

    Attributes:
        link: the link's name in messages.
        outward: the first hop of each path to the peer.
        inward: the last hop of each path from the peer, in the peer's order.
        timeout_s: seconds that a transfer may wait for a living peer.
        piece_bytes: where there are several paths, each carries pieces of at most this size.
        turns: by tag, the message's turn on links, relays' included, where several wait: less
            goes first; 0 where a tag is not named.
    """

    transport: Transport
    staging: Staging
    link: str
    outward: tuple[Path, ...]
    inward: tuple[Path, ...]
    timeout_s: float
    piece_bytes: int = 1 << 20
    turns: Mapping[str, int] = field(default_factory=dict)

    def send(self, tag: str, tensor: Tensor) -> WanHandle:
        """Start sending ``tensor``, which must not be changed until the handle is waited for.

        The handle's wait ends when the first hop of each path has the whole tensor.
        """
        name, transport, turn = _tag_bytes(tag), self.transport, self.turns.get(tag, 0)
        handle = WanHandle(self, f"{tag} was not taken", tensor, arrives=False)

        def submit(host: Tensor) -> list[int]:
            handle.host = host
            pieces = cut(self.outward, host.nbytes, self.piece_bytes)
            return [transport.send(path, name, turn, host.data_ptr() + at, size) for path, at, size in pieces]

        handle.requests = self.staging.outward(tensor, submit)
        transport.hold(handle)
        return handle

    def recv(self, tag: str, spec: TensorSpec) -> WanHandle:
        """Start receiving a tensor of ``spec``; returns at once."""
        name, transport = _tag_bytes(tag), self.transport
        host = self.staging.room(spec)
        handle = WanHandle(self, f"{tag} did not arrive", host, arrives=True)
        pieces = cut(self.inward, host.nbytes, self.piece_bytes)
        handle.requests.set_result(
            [transport.receive(path, name, host.data_ptr() + at, size) for path, at, size in pieces]
        )
        transport.hold(handle)
        return handle


class WanHandle:
    """A transfer over the WAN; see `weft.comm.channel.Handle`."""

    def __init__(self, channel: WanChannel, trouble: str, tensor: Tensor, *, arrives: bool) -> None:
        """Made by `WanChannel`; ``trouble`` is what a time-out says, ``arrives`` tells a receive."""
        self._channel, self._trouble, self._tensor, self._arrives = channel, trouble, tensor, arrives
        self._done = False
        self.host: Tensor | None = None  # what the transport reads, where that is not the tensor itself
        self.requests: Future[list[int]] = Future()

    def __del__(self) -> None:
        # The transport holds every handle whose transfer has not ended.
        if self.requests.done() and not self.requests.cancelled() and self.requests.exception() is None:
            for request in self.requests.result():
                self._channel.transport.free(request)

    def wait(self) -> Tensor:
        """Block until the transfer has ended, and return the tensor.

        Raises:
            ChannelError: the link has failed, or the peer did not do its part in time.
        """
        if self._done:
            return self._tensor
        channel, transport = self._channel, self._channel.transport
        limit = monotonic() + channel.timeout_s
        while (state := self._state(_POLL_S)) is State.PENDING:
            # A link without connections has a deadline of its own.
            if monotonic() > limit and transport.counters(channel.outward[0].peer).ready:
                raise ChannelError(
                    f"link {channel.link}: {self._trouble} within comm.timeout_s={channel.timeout_s:g}, "
                    "though the link is alive"
                )
        transport.let_go(self)
        if state is State.FAILED:
            raise ChannelError(next(filter(None, map(transport.error, self.requests.result()))))
        if self._arrives:
            self._tensor = channel.staging.inward(self._tensor)
        self._done, self.host = True, None
        return self._tensor

    def ended(self) -> bool:
        """Whether the transfer has ended, well or badly."""
        return self._done or (self.requests.done() and self._state(0.0) is not State.PENDING)

    def _state(self, timeout_s: float) -> State:
        """Pending while any piece is; else failed if any has."""
        try:
            requests = self.requests.result(timeout_s)
        except TimeoutError:
            return State.PENDING
        states = [self._channel.transport.wait(request, timeout_s) for request in requests]
        return State.PENDING if State.PENDING in states else min(states)


def cut(paths: Sequence[Path], num_bytes: int, piece_bytes: int) -> list[tuple[Path, int, int]]:
    """Share ``num_bytes`` out over paths, each one's share in pieces.

    A relay sends a piece on when it has all of it, so a share is several pieces: the hops
    inside the sites then hide behind the one between them.

    Returns:
        Path, offset and size of each piece; every path's first piece comes before any's second.
    """
    if len(paths) == 1 or num_bytes <= _SMALL_BYTES:
        return [(paths[0], 0, num_bytes)]
    share = -(-num_bytes // len(paths) // 64) * 64
    piece_bytes = min(piece_bytes, max(_LEAST_PIECE_BYTES, -(-share // _PIECES // 64) * 64))
    shares = [(path, index * share, min((index + 1) * share, num_bytes)) for index, path in enumerate(paths)]
    return [
        (path, start + offset, min(piece_bytes, end - start - offset))
        for offset in range(0, share, piece_bytes)
        for path, start, end in shares
        if start + offset < end
    ]


def _tag_bytes(tag: str) -> bytes:
    name = tag.encode()
    if len(name) > _TAG_BYTES or b"\0" in name:
        raise ValueError(f"tag {tag!r}: take at most {_TAG_BYTES} bytes, none of them 0")
    return name
