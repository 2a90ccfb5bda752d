"""The NCCL channel: a receive is launched when the sender's ready-to-send message (RTS) arrives.

An NCCL receive is a kernel that spins until the data comes. Launched ahead of time it would
occupy the device through every bubble, and every device synchronisation would wait for it. Here,
once the sender's device has reached a send, a 24-byte RTS goes to the receiver over gloo, and
only then does the receiver launch its kernel, on a separate stream. The send kernel is running by then, whatever the
launch order on other communicators (see docs/decisions/receives.md).
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec
from weft.comm.progress import Progress

SWITCH_S = 5e-4
"""Python's switch interval, in seconds, where RTS messages or timing marks wait for the interpreter lock."""


def shorten_switch_interval() -> None:
    """Switch threads every `SWITCH_S` instead of Python's 5 ms."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


@dataclass(frozen=True)
class RtsSend:
    """A launched send. See `weft.comm.channel.SendHandle`."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Make the current stream wait for the send, and return the tensor."""
        self.work.wait()
        return self.tensor

    def ended(self) -> bool:
        """True if the tensor has been sent."""
        return self.work.is_completed()


@dataclass(kw_only=True, eq=False)
class _RtsEnd:
    """One end of one direction. Both ends use the same groups, whose connections exist already.

    Attributes:
        peer: global rank of the other end.
        group: carries tensors of ``device``, in this direction only.
        rts_group: carries the RTS messages, from host memory.
        timeout_s: seconds after which a receiver's `wait` fails.
    """

    peer: int
    group: dist.ProcessGroup
    rts_group: dist.ProcessGroup
    device: torch.device
    timeout_s: float

    def __post_init__(self) -> None:
        self._count = 0
        self._rts_thread = Progress(f"weft rts with {self.peer}")

    def interrupt(self, error: Exception) -> None:
        """Fail later calls, and the waits for operations that are not launched yet. Callable from any thread."""
        self._rts_thread.fail(error)

    def close(self) -> None:
        """End the thread after the submitted operations."""
        self._rts_thread.close()


class RtsSender(_RtsEnd):
    """The sending end. See `weft.comm.channel.Sender`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _farewells.clear()
        self._peer_in_group = dist.get_group_rank(self.rts_group, self.peer)
        self._sent: deque[tuple[dist.Work | None, dist.Work]] = deque()  # RTS messages, each with its send

    def send(self, tag: str, tensor: Tensor) -> RtsSend:
        """Launch the send of ``tensor``, which must not be changed until the handle is waited for.

        Raises:
            ChannelError: the peer or another rank has exited.
        """
        if (error := self._rts_thread.error) is not None:
            raise ChannelError(f"link rank {dist.get_rank()} -> rank {self.peer}: {error}") from error
        tensor = tensor.contiguous()
        device_reached = _reached(self.device)
        work = dist.isend(tensor, self.peer, group=self.group)
        assert work is not None, "this rank is a member of the pair's group"
        rts = _rts(self._count, tag, tensor.nbytes)
        self._count += 1
        self._rts_thread.submit(lambda: self._send_rts(device_reached, rts, work))
        return RtsSend(work, tensor)

    def leave(self) -> None:
        """Close, and notify the receiver that no more messages follow."""
        self._rts_thread.close(self._tell_that_it_leaves)

    def _send_rts(self, device_reached: Callable[[], None], rts: Tensor, announced: dist.Work) -> None:
        device_reached()
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        self._sent.append((self._tell(rts), announced))

    def _tell_that_it_leaves(self) -> None:
        _farewells.append(self._tell(_LEAVES))

    def _tell(self, rts: Tensor) -> dist.Work | None:
        """Start sending an RTS. gloo sends it when the receiver posts its receive, which may never happen.

        The caller must keep a reference to the returned work until then.
        """
        # Not `dist.isend`, which fails once this process has left the job.
        return self.rts_group.send([rts], self._peer_in_group, 0)


class RtsReceiver(_RtsEnd):
    """The receiving end. See `weft.comm.channel.Receiver`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._link = f"rank {self.peer} -> rank {dist.get_rank()}"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def recv(self, tag: str, spec: TensorSpec) -> RtsReceive:
        """Post a receive of a tensor of ``spec``; its memory is allocated when the RTS arrives."""
        rts = _rts(self._count, tag, spec.dtype.itemsize * torch.Size(spec.shape).numel())
        self._count += 1
        launched = self._rts_thread.submit(lambda: self._receive(rts, spec))
        return RtsReceive(launched, self._link, tag, self.timeout_s)

    def _receive(self, expected: Tensor, spec: TensorSpec) -> tuple[dist.Work | None, Tensor]:
        rts = torch.empty_like(expected)
        dist.recv(rts, self.peer, group=self.rts_group)
        if (error := self._rts_thread.error) is not None:
            raise error  # interrupted: no caller waits, and nothing must be launched
        if torch.equal(rts, _LEAVES):
            raise ChannelError("it has left")
        assert torch.equal(rts, expected), (
            f"link {self._link}: received RTS {rts.tolist()}, expected {expected.tolist()}"
        )
        with self._on_receive_stream():
            buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            return dist.irecv(buffer, self.peer, group=self.group), buffer

    def _on_receive_stream(self) -> AbstractContextManager[object]:
        """Return a context in which the stream for receives is current. That stream does not wait for compute."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True)
class RtsReceive:
    """A receive that is launched when its RTS arrives. See `weft.comm.channel.Handle`."""

    launched: Future[tuple[dist.Work, Tensor]]
    link: str
    tag: str
    timeout_s: float

    def wait(self) -> Tensor:
        """Block until the receive is launched, make the current stream wait for it, and return the tensor.

        Raises:
            ChannelError: the sender has exited, or did not send in time.
        """
        try:
            work, tensor = self.launched.result(self.timeout_s)
        except (RuntimeError, TimeoutError) as error:
            why = str(error).partition(". ")[0]
            raise ChannelError(
                f"link {self.link}: {self.tag} did not arrive "
                + (f"and the peer has exited: {why}" if why else f"within comm.timeout_s={self.timeout_s:g}")
            ) from error
        work.wait()
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


def _reached(device: torch.device) -> Callable[[], None]:
    """Return a callable that blocks until the device has executed all work queued on the current stream so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _rts(number: int, tag: str, num_bytes: int) -> Tensor:
    return torch.tensor([number, crc32(tag.encode()), num_bytes])


_LEAVES = torch.tensor([-1, 0, 0])
"""Sent instead of an RTS when the sender leaves."""
_farewells: list[dist.Work | None] = []
"""Those of channels that this process has left, until it makes others, by when the peers have left theirs, too.

A peer may post a receive when the sending end is no more. It would wait for as long as this process waits for it.
"""
