"""Operations of a group over several sites that are in flight."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, SendHandle

_SLACK_S = 5.0
"""Seconds beyond the timeout, in which the channel below reports its own cause."""


class HostCopy:
    """A collective's tensor in host memory: the tensor itself on a CPU, a pinned copy on a GPU.

    The copy runs after the work queued on the current stream. The result is copied back on the stream that waits.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = self.host = tensor
        self._copied: torch.cuda.Event | None = None
        self._back: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> None:
        """Wait until the copy in host memory is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def give_back(self) -> None:
        """Copy the result to the device, once; the current stream waits for it, and the host does not."""
        if self._copied is None:
            return
        stream = torch.cuda.current_stream(self._tensor.device)
        if self._back is None:
            self._tensor.copy_(self.host, non_blocking=True)
            self._back = stream.record_event()
        stream.wait_event(self._back)


class CollectiveWork(dist.Work):
    """A launched collective."""

    def __init__(
        self,
        done: Future[None],
        *,
        label: str,
        written: Sequence[HostCopy],
        outputs: Sequence[Tensor],
        timeout: timedelta,
    ) -> None:
        """Create the work; called by the group.

        Args:
            written: copies of the tensors that the operation writes.
            outputs: returned by `result`.
        """
        super().__init__()
        self._done, self._label, self._written = done, label, written
        self._outputs, self._timeout = list(outputs), timeout

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until the collective ends. On a GPU the current stream then waits for the result's copy.

        Raises:
            ChannelError: a link between sites has failed, or the timeout has passed.
            RuntimeError: a member at this site has ended.
        """
        limit = (timeout or self._timeout).total_seconds()
        try:
            self._done.result(limit + _SLACK_S)
        except TimeoutError as error:
            raise ChannelError(f"{self._label} did not end within {limit:g} s") from error
        for copy in self._written:
            copy.give_back()
        return True

    def is_completed(self) -> bool:
        """True if the collective has completed or failed."""
        return self._done.done()

    def is_success(self) -> bool:
        """True if the collective has completed without an error."""
        return self._done.done() and self._done.exception() is None

    def exception(self) -> Any:
        """Return the error of a failed operation; otherwise None."""
        return self._done.exception() if self._done.done() else None

    def result(self) -> list[Tensor]:
        """Return the operation's output."""
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Return the future of `result`."""
        future: torch.futures.Future = torch.futures.Future()

        def tell(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                self.wait()
                future.set_result(self._outputs)
            else:
                future.set_exception(error)

        self._done.add_done_callback(tell)
        return future


class Arrival:
    """A gloo message that arrives in host memory. See `weft.comm.channel.SendHandle`."""

    def __init__(self, work: dist.Work, host: Tensor) -> None:
        self._work, self._host = work, host

    def wait(self) -> Tensor:
        """Block until the message has arrived, and return its tensor."""
        self._work.wait()
        return self._host

    def ended(self) -> bool:
        """True if the message has arrived or failed."""
        return bool(self._work.is_completed())


class TransferWork(dist.Work):
    """A message to or from another site."""

    def __init__(self, handle: SendHandle, target: Tensor | None) -> None:
        """Create the work. ``target`` receives the tensor, or is None for a send."""
        super().__init__()
        self._handle, self._target = handle, target

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the transfer has completed.

        Raises:
            ChannelError: the link has failed, or the timeout has passed.
        """
        arrived = self._handle.wait()
        if self._target is not None:
            self._target.copy_(arrived)
            self._target = None
        return True

    def is_completed(self) -> bool:
        """True if `wait` would return immediately."""
        return self._handle.ended()

    def is_success(self) -> bool:
        """True if the transfer has ended. A failure is raised by `wait`."""
        return self.is_completed()
