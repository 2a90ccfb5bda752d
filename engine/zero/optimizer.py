"""The optimiser of DeepSpeed's engine, which updates this rank's shards at any ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.sums import ReplicaSum, sum_now
from weft.engine.zero.bucket import Bucket
from weft.engine.zero.finite import REMEDY, HostCopy, NonFiniteError, NormWatch, all_finite, nonfinite_gradient
from weft.engine.zero.lamb import Lamb
from weft.engine.zero.norm import squared_norm
from weft.engine.zero.origin import Extremes, OwnNumbers, Source
from weft.engine.zero.sharding import Sharding
from weft.engine.zero.skipping import Skips, skipping, skips_on_device


class Presence:
    """The parameters of a rank's buckets that have a gradient in this step. Collective calls over their holders."""

    def __init__(
        self, buckets: Iterable[Bucket], start_sum: Callable[[Tensor], ReplicaSum], device: torch.device
    ) -> None:
        """Start to count the ranks with a gradient, parameter by parameter. This does not synchronise the host.

        Args:
            start_sum: starts to sum a tensor over the ranks that hold the same stages.
        """
        # Weights that are tied over pipeline ranks are embeddings, which always have a gradient.
        members = [(bucket, member) for bucket in buckets if bucket.tied is None for member in bucket.members]
        self._parameters = [member.parameter for _, member in members]
        here = [float(member in bucket.present) for bucket, member in members]
        self._lacks = not all(here)
        if here:
            self._counts = start_sum(torch.tensor(here).to(device, non_blocking=True))

    def absent(self) -> set[nn.Parameter]:
        """Return the parameters without a gradient on any rank. Synchronises the host if this rank lacks a gradient."""
        if not self._lacks:
            return set()
        counts = self._counts.wait().tolist()
        return {parameter for parameter, count in zip(self._parameters, counts, strict=True) if not count}


MOST_SKIPPED = 50
"""Most consecutive steps that may be skipped. fp16's loss scale reaches its minimum before."""


class ShardedOptimizer(DeepSpeedOptimizer):
    """Checks and clips this rank's shards of the gradients, and updates its shards of the weights.

    Works with `Lamb` and with any elementwise optimiser. At stage 0 parameters are complete, so any optimiser
    works. DeepSpeed's engine uses ``overflow``, ``cur_scale`` and ``param_groups``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sharding: Sharding,
        *,
        loss_scaler: LossScalerBase,
        clip: Callable[[], float],
        check_overflow: bool,
        skips: Skips | None = None,
        steps_done: Callable[[], int] = lambda: 0,
        stops: Callable[[], bool] = lambda: False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        replicas: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        """Replace the optimiser's parameters by this rank's fragments.

        Args:
            optimizer: an optimiser of the model's parameters that has not made a step yet.
            loss_scaler: the loss scaler of fp16, or a constant one.
            clip: returns the norm to which larger gradients are clipped. 0 disables clipping.
            check_overflow: skip steps whose gradients are not finite, see `conclude`. Otherwise such gradients are an
                error, which is detected one step later, or on a CPU that clips at once.
            skips: rule for skipping further steps. None skips no others.
            steps_done: returns the number of steps before this one, for messages.
            stops: returns whether this rank has received a request to stop, which is reduced with the norm.
            waiting: returns the context in which to wait for other ranks.
            replicas: group of this rank and its replicas. None means this rank alone.
            pipeline: group of this rank's pipeline. None means this rank alone.
        """
        self.optimizer, self.sharding, self.loss_scaler = optimizer, sharding, loss_scaler
        self.overflow = False
        self._clip, self._check_overflow = clip, check_overflow
        self.skips = skips or Skips()
        self._steps_done, self._stops = steps_done, stops
        self.must_stop = False
        """True if a rank has received a request to stop. Changes after the same step on every rank."""
        self._skipped = 0
        self._is_bad = False
        """True if this step is skipped for another reason than the loss scale, which then does not change."""
        self._failure: NonFiniteError | None = None
        self._watch = NormWatch(sharding.device)
        decides = check_overflow or self.skips.most > 0
        self._norms = HostCopy(sharding.device) if decides and skips_on_device(optimizer, sharding.device) else None
        """Copies the norm while the device updates the weights, if the device decides whether to skip a step."""
        self._skip: Tensor | None = None
        """1.0 if this step must be skipped, on the device, until `conclude` has read it."""
        self._waiting = waiting
        self._groups = {"replicas": replicas, "pipeline": pipeline}
        self._square: tuple[ReplicaSum, float] | None = None
        """Squared norm of the last gradient, times the square of the loss scale, with `must_stop`; and the loss
        scale."""
        self._presence: Presence | None = None
        self._origin: Callable[[], Source] = Source
        """Returns the source of non-finite numbers in the last step. Collective call."""
        self._updated = False
        """True if a step has updated the weights since they were loaded."""
        self._is_updating = False
        """True in an update of the weights, and after one that an error has interrupted."""
        self._fragments = tuple(sharding.fragments())
        held = [fragment for fragment in self._fragments if fragment.trained]
        fragments: dict[nn.Parameter, list[Tensor]] = {}
        for fragment in held:
            fragments.setdefault(fragment.parameter, []).append(fragment.tensor)
        for group in optimizer.param_groups:
            group["params"] = [tensor for parameter in group["params"] for tensor in fragments.get(parameter, ())]
        if isinstance(optimizer, Lamb) and sharding.is_shared_out:
            numbers = {p: number for number, p in enumerate(m.parameter for c in sharding.trained for m in c.members)}
            places = {fragment.tensor: numbers[fragment.parameter] for fragment in held}
            optimizer.join(places, len(numbers), sharding.collectives.sum, sharding.device)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimiser, which learning-rate schedules change."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The wrapped optimiser's state, by fragment."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """The loss scale: the factor that losses are multiplied by before the backward."""
        return self.loss_scaler.cur_scale

    @torch.no_grad()
    def reduce(self, loss: Tensor | None = None, hidden: Extremes = ()) -> None:
        """Wait for the reduction of gradients over replicas, and check their norm. Collective call.

        Args:
            loss: this rank's part of the step's loss, a scalar, or None without one. If steps may be skipped, it is
                checked with the gradient. It also distinguishes bad data from a bad rank.
            hidden: smallest and largest elements of the hidden states that this rank has computed, with the stage.

        Raises:
            NonFiniteError: on every rank, if the gradient of this step or the previous one is not finite.
            RuntimeError: an error has interrupted the last update of the weights.
        """
        self._check_updated()
        self._presence = Presence(self.sharding.trained, self._started_sum, self.sharding.device)
        with self._waiting():
            self.sharding.finish_gradients()
        try:
            self._take_stop(self._watch.check())
            self._square = self._summed(self._local_square(loss, hidden)), self.cur_scale
            self._check_gradient()
        except NonFiniteError as error:
            self._failure = error
            self.zero_grad()
            raise
        self._failure = None

    @torch.no_grad()
    def clip(self) -> None:
        """Divide the gradients by the loss scale and clip them. If this step is skipped (``overflow``), do nothing."""
        if self.overflow:
            return
        factor = torch.full((), 1.0 / self.cur_scale, device=self.sharding.device)
        if clip := self._clip():
            factor *= torch.clamp(clip / (self._awaited_norm() + 1e-6), max=1.0)
        elif self.cur_scale == 1.0:
            return
        if gradients := [bucket.gradient for bucket in self.sharding.trained]:
            torch._foreach_mul_(gradients, factor)

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights, start to gather them, and adapt the loss scale. Collective call. `conclude` must follow.

        A step that is skipped (``overflow``) only drops the gradients and adapts the loss scale.
        """
        assert self._presence is not None, "reduce() has to come before step()"
        if not self.overflow:
            with self._waiting():
                absent = self._presence.absent()
            for bucket in self.sharding.trained:
                bucket.assign_gradients(absent)
            self._is_updating = True
            with skipping(self.optimizer, self._skip):
                self.optimizer.step()
            self._updated |= self._skip is None
            self.sharding.publish()
            self._is_updating = False
        self._presence = None
        self.zero_grad()
        if self._skip is None:
            self._adapt_scale()

    def conclude(self) -> None:
        """Wait until the norm is known if the device has decided whether to skip this step, and adapt the loss scale.

        To be called after the last launch of a step. The norm arrives before the device has updated the weights.
        Optimisers that cannot skip on the device (`skips_on_device`) have waited before the update.

        Raises:
            NonFiniteError: on every rank, if too many consecutive steps were skipped.
        """
        if self._skip is None:
            return
        assert self._norms is not None
        self._skip = None
        with self._waiting():
            norm, stop = self._norms.read().tolist()
        self.must_stop |= bool(stop)
        try:
            self._decide(norm)
        except NonFiniteError as error:
            self._failure = error
            raise
        self._updated |= not self.overflow
        self._adapt_scale()

    def _adapt_scale(self) -> None:
        if not self._is_bad:
            self.loss_scaler.update_scale(self.overflow)

    def _check_gradient(self) -> None:
        """Check the gradient: now if this step needs the norm, in `conclude`, or at the end of the next step."""
        assert self._square is not None
        if self._norms is not None:
            self.overflow = self._is_bad = False
            norm = self._awaited_norm()
            self._skip = (~(norm.isfinite() & (norm <= self.skips.largest))).float()
            norms = torch.stack([norm, self._square[0].wait()[1]])
            self._norms.send(lambda: norms)
        elif self.skips.most or self._check_overflow:
            self._decide(self._read_norm())
        else:
            self._watch.watch(self._steps_done() + 1, *self._square, self._origin)
            if self._clip() and self.sharding.device.type == "cpu":
                self._take_stop(self._watch.check())

    def _decide(self, norm: float) -> None:
        """Set whether this step is skipped, by the norm of its gradient.

        Raises:
            NonFiniteError: too many consecutive steps were skipped.
        """
        step = self._steps_done() + 1
        if self.skips.most:
            overflows = not isfinite(norm) and self._can_lower_scale()
            self._is_bad = not overflows and not self.skips.judge(step, norm, self._origin)
            self.overflow = overflows or self._is_bad
            return
        self.overflow = not isfinite(norm)
        self._skipped = self._skipped + 1 if self.overflow else 0
        if self._skipped > MOST_SKIPPED:
            raise nonfinite_gradient(step, norm, self._origin())

    def _read_norm(self) -> float:
        """Return the norm, and take a request to stop that was reduced with it. The host waits once for both."""
        assert self._square is not None
        norm, stop = torch.stack([self._awaited_norm(), self._square[0].wait()[1]]).tolist()
        self.must_stop |= bool(stop)
        return norm

    def _take_stop(self, sums: Tensor | None) -> None:
        if sums is not None and float(sums[1]):
            self.must_stop = True

    def _can_lower_scale(self) -> bool:
        """True if the loss scale may be the cause of a gradient that is not finite."""
        scaler = self.loss_scaler
        return self._check_overflow and scaler.dynamic and scaler.cur_scale > scaler.min_scale

    def check_finite(self) -> None:
        """Check that weights and optimiser state are finite, so that they may be saved.

        Collective call, which synchronises the device.

        Raises:
            NonFiniteError: on every rank, if the last gradient, a weight or optimiser state is not finite.
            RuntimeError: an error has interrupted the last update of the weights.
        """
        self._check_updated()
        if self._failure is not None:  # the weights that caused it must not be saved even if they are finite
            raise self._failure
        self._take_stop(self._watch.check())
        held = [tensor for bucket in self.sharding.trained for tensor in bucket.held_weights]
        held += [x for state in self.state.values() for x in state.values() if isinstance(x, Tensor)]
        finite = all_finite(held, self.sharding.device)
        if dist.is_initialized():
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite:
            raise NonFiniteError(
                f"step {self._steps_done()}: weights or the optimiser's state are no longer finite. {REMEDY}"
            )

    def _check_updated(self) -> None:
        if self._is_updating:
            raise RuntimeError(
                f"an error has interrupted the update of step {self._steps_done() + 1}: some weights are those before "
                "it and some those after it. Load a checkpoint"
            )

    def restored(self, norms: list[float]) -> None:
        """Reset the checks, because weights and state were restored from a checkpoint.

        Args:
            norms: earlier gradients' norms, from `Skips.norms`.
        """
        self._watch.reset()
        self._failure, self._updated, self._is_updating = None, False, False
        self.skips.restore(norms)

    @property
    def gradient_norm(self) -> Tensor | None:
        """2-norm of the whole model's gradient in the last step, or None before the first.

        This blocks until the norm has been summed over all ranks. It does not block if the step itself needed the norm.
        """
        if self._square is None:
            return None
        sums, scale = self._square
        return sums.wait()[0].sqrt() / scale

    def _summed(self, square: Tensor) -> ReplicaSum:
        if not (self._clip() or self._check_overflow or self.skips.most):  # the sum may overlap with the next step
            return ReplicaSum(square, dist.group.WORLD if dist.is_initialized() else None)
        with self._waiting():
            return ReplicaSum(sum_now(square, **self._groups), None)

    def _started_sum(self, counts: Tensor) -> ReplicaSum:
        return ReplicaSum(counts, self._groups["replicas"])

    def _awaited_norm(self) -> Tensor:
        with self._waiting():
            norm = self.gradient_norm
        assert norm is not None
        return norm

    def _local_square(self, loss: Tensor | None, hidden: Extremes) -> Tensor:
        """Return a tensor to sum over ranks: this rank's part of the squared norm, and 1 if this rank must stop."""
        buckets = self.sharding.trained
        square = squared_norm((b.counted_gradient for b in buckets if b.counted_squares is None), self.sharding.device)
        if known := [b.counted_squares for b in buckets if b.counted_squares is not None]:
            square += torch.cat(known).double().sum()
        self._origin = OwnNumbers.of_step(
            buckets,
            loss,
            self._groups["pipeline"],
            hidden,
            self._fragments,
            updated=self._updated,
        ).origin
        if self.skips.most and loss is not None:
            square += 0 * loss  # NaN if the loss is not finite
        return torch.stack([square, torch.full_like(square, float(self._stops()))])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the step."""
        for bucket in self.sharding.trained:
            bucket.drop_gradient()

    def state_dict(self) -> dict[str, Any]:
        """Raise an error, because the state of one rank by position fits no other layout."""
        raise RuntimeError("use engine.save_checkpoint(), which stores by parameter name")

    load_state_dict = state_dict

    def destroy(self) -> None:
        """Stop the threads of the collectives, and release the model."""
        self.sharding.close()
