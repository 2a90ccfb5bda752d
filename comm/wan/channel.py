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
_SMALL_BYTES = 64 << 10  # smaller tensors use one path
_PIECES = 4  # pieces per share, unless they become too small or too large
_LEAST_PIECE_BYTES = 16 << 10
_POLL_S = 0.2  # so that Ctrl-C is handled


@dataclass(frozen=True, kw_only=True)
class WanChannel:
    """A channel to one peer. Messages of one tag arrive in order. See `weft.comm.channel.Channel`.

    Tensors are sent in pieces over one or several paths; both ends use the same paths.

    Attributes:
        link: the link's name in error messages.
        outward: the first hop of each path to the peer.
        inward: the last hop of each path from the peer, in the peer's order.
        timeout_s: seconds after which a transfer on a working link fails.
        piece_bytes: maximum size of a piece, if there are several paths.
        priorities: priority of each tag's message among those queued for a link, also at relays;
            lower goes first, the default is 0.
    """

    transport: Transport
    staging: Staging
    link: str
    outward: tuple[Path, ...]
    inward: tuple[Path, ...]
    timeout_s: float
    piece_bytes: int = 1 << 20
    priorities: Mapping[str, int] = field(default_factory=dict)

    def send(self, tag: str, tensor: Tensor) -> WanHandle:
        """Start sending ``tensor``, which must not be modified before the handle's `wait` returns.

        The send is complete when the first hop of each path has acknowledged all pieces.
        """
        name, transport, priority = _tag_bytes(tag), self.transport, self.priorities.get(tag, 0)
        handle = WanHandle(self, f"{tag} could not be sent", tensor, arrives=False)

        def submit(host: Tensor) -> list[int]:
            handle.host = host
            pieces = cut(self.outward, host.nbytes, self.piece_bytes)
            return [transport.send(path, name, priority, host.data_ptr() + at, size) for path, at, size in pieces]

        handle.requests = self.staging.outward(tensor, submit)
        transport.retain(handle)
        return handle

    def recv(self, tag: str, spec: TensorSpec) -> WanHandle:
        """Start receiving a tensor of ``spec`` and return immediately."""
        name, transport = _tag_bytes(tag), self.transport
        host = self.staging.receive_buffer(spec)
        handle = WanHandle(self, f"{tag} did not arrive", host, arrives=True)
        pieces = cut(self.inward, host.nbytes, self.piece_bytes)
        handle.requests.set_result(
            [transport.receive(path, name, host.data_ptr() + at, size) for path, at, size in pieces]
        )
        transport.retain(handle)
        return handle


class WanHandle:
    """A transfer over the WAN. See `weft.comm.channel.Handle`."""

    def __init__(self, channel: WanChannel, trouble: str, tensor: Tensor, *, arrives: bool) -> None:
        """Create a handle. ``trouble`` is the message of a time-out, ``arrives`` is true for receives."""
        self._channel, self._trouble, self._tensor, self._arrives = channel, trouble, tensor, arrives
        self._done = False
        self.host: Tensor | None = None  # the copy that the transport reads, if it is not the tensor itself
        self.requests: Future[list[int]] = Future()

    def __del__(self) -> None:
        # The transport holds the handles of unfinished transfers.
        if self.requests.done() and not self.requests.cancelled() and self.requests.exception() is None:
            for request in self.requests.result():
                self._channel.transport.free(request)

    def wait(self) -> Tensor:
        """Block until the transfer is complete, and return the tensor.

        Raises:
            ChannelError: the link failed, or the peer did not post its side in time.
        """
        if self._done:
            return self._tensor
        channel, transport = self._channel, self._channel.transport
        limit = monotonic() + channel.timeout_s
        while (state := self._state(_POLL_S)) is State.PENDING:
            # A link without connections has its own deadline.
            if monotonic() > limit and transport.counters(channel.outward[0].peer).ready:
                raise ChannelError(
                    f"link {channel.link}: {self._trouble} within comm.timeout_s={channel.timeout_s:g}, "
                    "though the link is alive"
                )
        transport.release(self)
        if state is State.FAILED:
            raise ChannelError(next(filter(None, map(transport.error, self.requests.result()))))
        if self._arrives:
            self._tensor = channel.staging.inward(self._tensor)
        self._done, self.host = True, None
        return self._tensor

    def ended(self) -> bool:
        """True if the transfer has completed or failed."""
        return self._done or (self.requests.done() and self._state(0.0) is not State.PENDING)

    def _state(self, timeout_s: float) -> State:
        """Return pending while any piece is pending, otherwise failed if any piece failed."""
        try:
            requests = self.requests.result(timeout_s)
        except TimeoutError:
            return State.PENDING
        states = [self._channel.transport.wait(request, timeout_s) for request in requests]
        return State.PENDING if State.PENDING in states else min(states)


def cut(paths: Sequence[Path], num_bytes: int, piece_bytes: int) -> list[tuple[Path, int, int]]:
    """Split ``num_bytes`` evenly over paths, and each share into pieces.

    A relay forwards a piece once it is complete, so a share has several pieces: the hops inside
    the sites are then hidden behind the one between them.

    Returns:
        Path, offset and size of each piece, round-robin over paths.
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
        raise ValueError(f"tag {tag!r}: at most {_TAG_BYTES} bytes, none of them 0")
    return name
