"""The NCCL channel: a receive is launched when the sender's ready-to-send message (RTS) arrives.

An NCCL receive is a kernel that spins until the data comes. Launched ahead of time it would
occupy the device through every bubble, and every device synchronisation would wait for it. Here,
once the sender's device has reached a send, a 24-byte RTS goes to the receiver over gloo, and
only then does the receiver launch its kernel, on a separate stream. Its partner is running by
then, whatever the launch order on other communicators (see docs/decisions/receives.md).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import ChannelError, TensorSpec

SWITCH_S = 5e-4
"""Python's switch interval, in seconds, where RTS messages or timing marks wait for the interpreter lock."""


def shorten_switch_interval() -> None:
    """Switch threads every `SWITCH_S` instead of Python's 5 ms."""
    sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))


@dataclass(frozen=True)
class RtsSend:
    """A launched send; see `weft.comm.channel.SendHandle`."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Make the current stream wait for the send, and return the tensor."""
        self.work.wait()
        return self.tensor

    def ended(self) -> bool:
        """Whether the tensor has been sent."""
        return self.work.is_completed()


@dataclass(kw_only=True, eq=False)
class _RtsEnd:
    """One end of a direction; both ends use the same groups, which are connected already.

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
        self._error: Exception | None = None
        self._rts_thread = _Worker(f"weft rts with {self.peer}", self.interrupt)

    def interrupt(self, error: Exception) -> None:
        """Have calls and waits fail, from any thread."""
        self._error = error

    def close(self) -> None:
        """End the thread."""
        self._rts_thread.close()


class RtsSender(_RtsEnd):
    """The sending end; see `weft.comm.channel.Sender`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sent: deque[tuple[dist.Work | None, dist.Work]] = deque()  # RTS messages, with what they announce

    def send(self, tag: str, tensor: Tensor) -> RtsSend:
        """Launch the send of ``tensor``, which must not be changed until the handle is waited for.

        Raises:
            ChannelError: the peer has exited, or another rank.
        """
        if self._error is not None:
            raise ChannelError(f"link rank {dist.get_rank()} -> rank {self.peer}: {self._error}") from self._error
        tensor = tensor.contiguous()
        device_reached = _reached(self.device)
        work = dist.isend(tensor, self.peer, group=self.group)
        assert work is not None, "this rank is a member of the pair's group"
        rts = _rts(self._count, tag, tensor.nbytes)
        self._count += 1
        self._rts_thread.put(lambda: self._send_rts(device_reached, rts, work))
        return RtsSend(work, tensor)

    def leave(self) -> None:
        """Let the receiver know that nothing more will come; `close` has to follow."""
        self._rts_thread.put(lambda: self._tell(_LEAVES))

    def _send_rts(self, device_reached: Callable[[], None], rts: Tensor, announced: dist.Work) -> None:
        device_reached()
        while self._sent and self._sent[0][1].is_completed():
            self._sent.popleft()
        self._sent.append((self._tell(rts), announced))

    def _tell(self, rts: Tensor) -> dist.Work | None:
        """Not waited for: gloo sends it when the receiver has come that far, which it may never do.

        The result has to be kept until then.
        """
        return dist.isend(rts, self.peer, group=self.rts_group)


class RtsReceiver(_RtsEnd):
    """The receiving end; see `weft.comm.channel.Receiver`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._link = f"rank {self.peer} -> rank {dist.get_rank()}"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._waiting: set[Future[tuple[dist.Work, Tensor]]] = set()

    def interrupt(self, error: Exception) -> None:
        """Have receives fail that are not launched yet, from any thread."""
        super().interrupt(error)
        for launched in list(self._waiting):
            _fail(launched, error)

    def recv(self, tag: str, spec: TensorSpec) -> RtsReceive:
        """Post a receive of a tensor of ``spec``; its memory is allocated when the RTS arrives."""
        launched: Future[tuple[dist.Work, Tensor]] = Future()
        rts = _rts(self._count, tag, spec.dtype.itemsize * torch.Size(spec.shape).numel())
        self._count += 1
        self._waiting.add(launched)
        launched.add_done_callback(self._waiting.discard)
        if self._error is not None:
            _fail(launched, self._error)
        self._rts_thread.put(lambda: self._receive(rts, spec, launched))
        return RtsReceive(launched, self._link, tag, self.timeout_s)

    def _receive(self, expected: Tensor, spec: TensorSpec, launched: Future) -> None:
        try:
            rts = torch.empty_like(expected)
            dist.recv(rts, self.peer, group=self.rts_group)
            if launched.done():
                return
            if torch.equal(rts, _LEAVES):
                raise ChannelError("it has left")
            assert torch.equal(rts, expected), (
                f"link {self._link}: received RTS {rts.tolist()}, expected {expected.tolist()}"
            )
            with self._on_receive_stream():
                buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
                work = dist.irecv(buffer, self.peer, group=self.group)
            _settle(launched, lambda: launched.set_result((work, buffer)))
        except Exception as error:
            _fail(launched, error)
            raise  # to those behind it as well

    def _on_receive_stream(self) -> AbstractContextManager[object]:
        """The stream of receives, which does not wait for compute."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass(frozen=True)
class RtsReceive:
    """A receive that is launched when its RTS arrives; see `weft.comm.channel.Handle`."""

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


class _Worker:
    """A daemon thread that runs callables in order."""

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed = failed
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, work: Callable[[], None]) -> None:
        """Queue ``work``."""
        self._work.put(work)

    def close(self) -> None:
        """Stop after what is queued."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # raised by the next call on the channel
                return self._failed(error)
            del work  # it would keep the last tensor alive


def _reached(device: torch.device) -> Callable[[], None]:
    """A callable that blocks until the device has executed what is queued on the current stream so far."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


def _settle(future: Future, settle: Callable[[], None]) -> None:
    with suppress(InvalidStateError):  # it has failed meanwhile
        settle()


def _fail(future: Future, error: Exception) -> None:
    _settle(future, lambda: future.set_exception(error))


def _rts(number: int, tag: str, num_bytes: int) -> Tensor:
    return torch.tensor([number, crc32(tag.encode()), num_bytes])


_LEAVES = torch.tensor([-1, 0, 0])
"""In place of an RTS: the sender leaves."""
