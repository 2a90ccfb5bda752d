"""Detection of NaN and infinity without synchronising host and device, before anything is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.sums import ReplicaSum
from weft.engine.stages.cutting.stage import HEAD, HEAD_WEIGHT
from weft.engine.zero.origin import Source

NOWHERE = Source()
"""The source of non-finite numbers that come from the data or from divergence."""


class NonFiniteError(RuntimeError):
    """Training has produced NaN or infinity. Raised on every rank, at the same step.

    Attributes:
        source: where it first appeared.
        ranks: the ranks of the source.
    """

    def __init__(self, message: str, source: Source = NOWHERE) -> None:
        super().__init__(message)
        self.source = source
        self.ranks = source.ranks


REMEDY = (
    "Nothing of it was saved: resume from the last checkpoint with a smaller optimizer.lr, more optimizer.warmup_steps "
    "or optimizer.clip, and look at the data that this step read"
)


def nonfinite_gradient(step: int, norm: float, source: Source = NOWHERE) -> NonFiniteError:
    """Return the error for a gradient norm that is not finite, with its ``source``."""
    return NonFiniteError(f"step {step}: the norm of the gradient is {norm}: {explanation(source)}", source)


def explanation(source: Source) -> str:
    """Return the cause of numbers that are not finite, and the remedy."""
    if not source.ranks:
        return f"training has diverged. {REMEDY}"
    if source.forward == HEAD_WEIGHT:
        return (
            f"{first_appeared(source)}, before this step and although the head's input was finite: look at the "
            f"checkpoint or the model.path that the weights come from. {REMEDY}"
        )
    if source.weights and not source.updated:
        return (
            f"{first_appeared(source)}, as they were loaded: look at the checkpoint or the model.path that they come "
            f"from. {REMEDY}"
        )
    if source.weights:
        return (
            f"{first_appeared(source)}: the update of the step before made them so, although its gradient was finite. "
            f"Test the hosts of these ranks with weft doctor node. {REMEDY}"
        )
    before = {-1: "their losses were", HEAD: "its input and weight were"}.get(source.forward, "the stage's input was")
    return (
        f"{first_appeared(source)}, although {before} finite: a host fails, or the weights are too large. "
        f"Test the hosts of these ranks with weft doctor node, and keep a bad one out with weft evict. {REMEDY}"
    )


def first_appeared(source: Source) -> str:
    """Describe where non-finite numbers first appeared."""
    names = {-1: "the gradients", HEAD_WEIGHT: "the weight of the model's head", HEAD: "the logits of the model's head"}
    where = names.get(source.forward, f"the forward of stage {source.forward}")
    if source.weights:
        where = f"weights ({', '.join(source.weights)})"
    ranks = f"rank{'s' * (len(source.ranks) > 1)} {', '.join(map(str, source.ranks))}"
    before = ", before this step" if source.weights else ""
    return f"NaN or infinity first appeared in {where} of {ranks}{before}"


class _PendingNorm(NamedTuple):
    step: int
    scale: float
    origin: Callable[[], Source]


class NormWatch:
    """Checks that a step's gradient norm is finite, at the end of the next step, to avoid a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._pending: _PendingNorm | None = None
        self._copy = HostCopy(device)

    def watch(self, step: int, square: ReplicaSum, scale: float, origin: Callable[[], Source] = Source) -> None:
        """Store the norm of a step for the next `check`.

        Args:
            square: a sum over ranks in progress. Its first element is the square of ``scale`` times the norm.
            origin: returns the source of a norm that is not finite. Called on all ranks or on none.
        """
        assert self._pending is None, "the pending norm has not been checked"
        self._pending = _PendingNorm(step, scale, origin)
        self._copy.send(square.wait)

    def reset(self) -> None:
        """Drop the pending norm, because the weights have been replaced."""
        self._pending = None

    def check(self) -> Tensor | None:
        """Read the pending sum, if there is one, and return it. Raise NonFiniteError if the norm is not finite."""
        if self._pending is None:
            return None
        (step, scale, origin), self._pending = self._pending, None
        found = self._copy.read()
        square = float(found.reshape(-1)[0])
        if not isfinite(square):
            raise nonfinite_gradient(step, square**0.5 / scale, origin())
        return found


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return a scalar on ``device``: 1 if all elements of floating-point tensors are finite, otherwise 0."""
    numbers = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not numbers:
        return torch.ones((), device=device)
    ends = [end.to(device, torch.float64) for tensor in numbers for end in torch.aminmax(tensor)]
    return torch.isfinite(torch.stack(ends)).all().float()


class HostCopy:
    """A buffer in host memory for one tensor at a time.

    On a GPU the copy runs on a separate stream. The host reads it one step later, while the device already runs the
    next step, so that neither waits for the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived = None if self._stream is None else torch.cuda.Event()
        self._on_host: Tensor | None = None
        self._wait: Callable[[], Tensor] | None = None

    def send(self, wait: Callable[[], Tensor]) -> None:
        """Start to copy the result of ``wait``. On a GPU only the stream that is current in ``wait`` waits."""
        self._wait = wait
        if self._stream is None or self._arrived is None:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            source = wait()
            if self._on_host is None or self._on_host.shape != source.shape:
                self._on_host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._on_host.copy_(source, non_blocking=True)
            source.record_stream(self._stream)  # a copy that is never read may run after the tensor is freed
            self._arrived.record(self._stream)

    def read(self) -> Tensor:
        """Return the last copied value in host memory. Blocks until it has arrived."""
        assert self._wait is not None, "nothing was sent"
        wait, self._wait = self._wait, None
        if self._arrived is None:
            return wait()
        self._arrived.synchronize()
        assert self._on_host is not None
        return self._on_host
