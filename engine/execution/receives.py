"""Receives that are posted in advance: a window over the messages that one neighbour will send."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from weft.comm.channel import Handle, Receiver, TensorSpec
from weft.pipeline.action import Action


class ReceiveQueue:
    """The receives of one step from one neighbour, in the order in which it sends.

    A transport such as gloo transfers nothing before the receive is posted, and NCCL matches messages by
    order. So receives are posted in the sender's order. ``ahead`` of them are posted at any time, and more if a
    later message is needed first.
    """

    def __init__(self, channel: Receiver, messages: Sequence[tuple[Action, TensorSpec]], *, ahead: int) -> None:
        """Post the first ``ahead`` of ``messages``."""
        self._channel = channel
        self._unposted = deque(messages)
        self._posted: dict[Action, Handle] = {}
        self._ahead = ahead
        self._fill()

    def wait(self, action: Action) -> Tensor:
        """Return the tensor of the receive ``action``. Blocks until the tensor has arrived.

        Raises:
            ChannelError: the deadline passed, or the link broke.
        """
        while action not in self._posted:
            self._post()
        handle = self._posted.pop(action)
        self._fill()  # before the wait, during which these transfers may proceed
        return handle.wait()

    def _fill(self) -> None:
        while self._unposted and len(self._posted) < self._ahead:
            self._post()

    def _post(self) -> None:
        action, spec = self._unposted.popleft()
        self._posted[action] = self._channel.recv(str(action), spec)
