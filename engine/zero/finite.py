"""Numbers that are none: found without making the host wait for the device, before anything is saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.execution.sums import ReplicaSum


class NonFiniteError(RuntimeError):
    """Training has arrived at numbers that are not finite; raised on every rank, at the same step."""


REMEDY = (
    "Nothing of it was saved: resume from the last checkpoint with a smaller optimizer.lr, more optimizer.warmup_steps "
    "or optimizer.clip, and look at the data that this step read"
)


def astray(step: int, norm: float) -> NonFiniteError:
    """The error for a gradient whose norm is not finite."""
    return NonFiniteError(f"step {step}: the norm of the gradient is {norm}, so training has gone astray. {REMEDY}")


class _Question(NamedTuple):
    step: int
    square: ReplicaSum
    scale: float


class NormWatch:
    """Asks whether a step's norm is finite, and reads the answer when the next step ends.

    On a GPU the norm goes to the host on a stream of its own, once it has been summed; nothing
    else waits for it, and when it is read the device has been given another step's work.
    """

    def __init__(self, device: torch.device) -> None:
        """Take the place on the host where norms of ``device`` arrive."""
        self._question: _Question | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._arrived = torch.cuda.Event()
            self._on_host = torch.zeros((), dtype=torch.float64, pin_memory=True)

    def ask(self, step: int, square: ReplicaSum, scale: float) -> None:
        """Begin to watch the norm of ``step``, whose square is being summed and is that of ``scale`` times it."""
        assert self._question is None, "the last answer has not been read"
        self._question = _Question(step, square, scale)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                self._on_host.copy_(square.wait(), non_blocking=True)
                self._arrived.record()

    def forget(self) -> None:
        """Ask no more: the weights are others now."""
        self._question = None

    def answer(self) -> None:
        """Read the norm that was asked about, if there is one.

        Raises:
            NonFiniteError: it is not finite.
        """
        if self._question is None:
            return
        (step, square, scale), self._question = self._question, None
        if self._stream is None:
            found = square.wait()
        else:
            self._arrived.synchronize()
            found = self._on_host
        if not torch.isfinite(found):
            raise astray(step, float(found) ** 0.5 / scale)


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Whether every element of every floating-point tensor is finite: one read of each; 1 or 0, on ``device``."""
    numbers = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not numbers:
        return torch.ones((), device=device)
    ends = [end.to(device, torch.float64) for tensor in numbers for end in torch.aminmax(tensor)]
    return torch.isfinite(torch.stack(ends)).all().float()
