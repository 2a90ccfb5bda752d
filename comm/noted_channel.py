"""The channel between two devices: a receive is posted when the sender's note says that its device sends.

On a GPU a posted receive is a kernel that spins until the message comes. Posted ahead, it would
hold the device through every bubble, and whatever synchronises the device would wait behind it.
Here the sender's device tells the host when it has reached a send, a note of 24 bytes goes to the
receiver over gloo, and only then does the receiver launch its side, on a stream of its own. So
what spins has its partner running already, whatever the order of launches on other communicators
(see docs/decisions/receives.md).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec

SWITCH_S = 5e-4
"""Longest time that a thread waits for the interpreter, where notes or marks depend on it."""


def give_way_often() -> None:
    """Let threads have the interpreter after `SWITCH_S` instead of Python's 5 ms."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


@dataclass(frozen=True)
class NotedSend:
    """A send that was launched; see `weft.comm.channel.Transfer`."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Make the current stream wait until the tensor has been sent, and return it."""
        self.work.wait()
        return self.tensor

    def ended(self) -> bool:
        """Whether the tensor has been sent."""
        return self.work.is_completed()


class NotedSender:
    """The sender's end; see `weft.comm.channel.Sender`."""

    def __init__(
        self,
        *,
        peer: int,
        group: dist.ProcessGroup,
        notes: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Both ends share the groups, and have exchanged a first message.

        Args:
            peer: global rank at the other end.
            group: carries tensors of ``device``, and nothing but this direction.
            notes: carries tensors in host memory.
            timeout_s: unused here; the receiver has the deadline.
        """
        self._peer, self._group, self._notes, self._device = peer, group, notes, device
        self._link = f"rank {dist.get_rank()} -> rank {peer}"
        self._sent = 0
        self._error: Exception | None = None
        self._teller = _Worker(f"weft notes to {peer}", self._failed)

    def send(self, tag: str, tensor: Tensor) -> NotedSend:
        """Launch the send of ``tensor``, which must not be changed until the handle is waited for.

        Raises:
            ChannelError: the peer has ended.
        """
        if self._error is not None:
            raise ChannelError(f"link {self._link}: the peer has ended: {self._error}") from self._error
        tensor = tensor.contiguous()
        reached = _reached(self._device)
        work = dist.isend(tensor, self._peer, group=self._group)
        assert work is not None, "this rank is a member of the pair's group"
        note = _note(self._sent, tag, tensor.nbytes)
        self._sent += 1
        self._teller.put(lambda: self._tell(reached, note))
        return NotedSend(work, tensor)

    def close(self) -> None:
        """End the thread."""
        self._teller.close()

    def _tell(self, reached: Callable[[], None], note: Tensor) -> None:
        reached()
        dist.send(note, self._peer, group=self._notes)

    def _failed(self, error: Exception) -> None:
        self._error = error


class NotedReceiver:
    """The receiver's end; see `weft.comm.channel.Receiver`."""

    def __init__(
        self,
        *,
        peer: int,
        group: dist.ProcessGroup,
        notes: dist.ProcessGroup,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """See `NotedSender`.

        Args:
            peer, group, notes: as there.
            timeout_s: how long a `wait` lasts at most.
        """
        self._peer, self._group, self._notes, self._device = peer, group, notes, device
        self._link = f"rank {peer} -> rank {dist.get_rank()}"
        self._timeout_s = timeout_s
        self._asked = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._listener = _Worker(f"weft notes from {peer}", lambda _: None)

    def recv(self, tag: str, spec: TensorSpec) -> NotedReceive:
        """Expect a tensor of ``spec``; its memory is taken when it is on its way."""
        coming: Future[tuple[dist.Work, Tensor]] = Future()
        note = _note(self._asked, tag, spec.dtype.itemsize * torch.Size(spec.shape).numel())
        self._asked += 1
        self._listener.put(lambda: self._listen(note, spec, coming))
        return NotedReceive(coming, self._link, tag, self._timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._listener.close()

    def _listen(self, expected: Tensor, spec: TensorSpec, coming: Future) -> None:
        try:
            note = torch.empty_like(expected)
            dist.recv(note, self._peer, group=self._notes)
            assert torch.equal(note, expected), f"link {self._link}: {note.tolist()} came, not {expected.tolist()}"
            with self._beside():
                buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                work = dist.irecv(buffer, self._peer, group=self._group)
            coming.set_result((work, buffer))
        except Exception as error:
            coming.set_exception(error)

    def _beside(self) -> AbstractContextManager[object]:
        """On the stream of receives, which waits for nothing that computes."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True)
class NotedReceive:
    """A receive that is posted when its note comes; see `weft.comm.channel.Handle`."""

    coming: Future[tuple[dist.Work, Tensor]]
    link: str
    tag: str
    timeout_s: float

    def wait(self) -> Tensor:
        """Block until the tensor is on its way, make the current stream wait for it, and return it.

        Raises:
            ChannelError: the sender has ended, or did not send in time.
        """
        try:
            work, tensor = self.coming.result(self.timeout_s)
        except (RuntimeError, TimeoutError) as error:
            why = str(error).partition(". ")[0]
            raise ChannelError(
                f"link {self.link}: {self.tag} did not arrive "
                + (f"and the peer has ended: {why}" if why else f"within comm.timeout_s={self.timeout_s:g}")
            ) from error
        work.wait()
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


class _Worker:
    """A thread that does one thing after the other, and dies with the process."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = failed
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Do ``work`` next."""
        self._work.put(work)

    def close(self) -> None:
        """Do no more."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # told to whoever uses the channel next
                return self._failed(error)
            del work  # or the last tensor would live on


def _reached(device: torch.device) -> Callable[[], None]:
    """Blocks its caller until the device has done what is queued on the current stream so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _note(number: int, tag: str, num_bytes: int) -> Tensor:
    return torch.tensor([number, crc32(tag.encode()), num_bytes])
