"""The optimiser that DeepSpeed's engine holds: it steps this rank's shards, whatever the ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.engine.execution.sums import ReplicaSum, sum_now
from weft.engine.zero.finite import REMEDY, NonFiniteError, NormWatch, all_finite, astray
from weft.engine.zero.lamb import Lamb
from weft.engine.zero.norm import squared_norm
from weft.engine.zero.sharding import Sharding

MOST_SKIPPED = 50
"""Steps that may be skipped one after the other; fp16's loss scale has reached its least before."""


class ShardedOptimizer(DeepSpeedOptimizer):
    """Clips, checks for overflow and steps, on shards.

    With `Lamb`, or any optimiser that works on each element by itself; at stage 0 parameters
    are whole and any optimiser will do. Attributes that DeepSpeed's
    engine looks for: ``overflow``, ``cur_scale``, ``param_groups``.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sharding: Sharding,
        *,
        loss_scaler: LossScalerBase,
        clip: Callable[[], float],
        check_overflow: bool,
        steps_done: Callable[[], int] = lambda: 0,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        replicas: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
    ) -> None:
        """Put this rank's fragments in the place of the parameters.

        Args:
            optimizer: made for the model's parameters, and not stepped yet.
            loss_scaler: of fp16; one that never changes otherwise.
            clip: gives the largest norm of the gradient; 0 is none.
            check_overflow: whether a step with gradients that are not finite is skipped, for which the
                host waits in every step. Otherwise it is an error, which is found one step later
                unless the norm is there anyway.
            steps_done: steps before this one, for messages.
            waiting: entered while other ranks are waited for.
            replicas: this rank's and its replicas' group; None is this rank alone.
            pipeline: the group of this rank's pipeline; None is this rank alone.
        """
        self.optimizer = optimizer
        self.sharding = sharding
        self.loss_scaler = loss_scaler
        self.overflow = False
        self._clip = clip
        self._check_overflow = check_overflow
        self._steps_done = steps_done
        self._skipped = 0
        self._astray: NonFiniteError | None = None
        self._watch = NormWatch(sharding.device)
        self._waiting = waiting
        self._groups = {"replicas": replicas, "pipeline": pipeline}
        self._square: ReplicaSum | None = None
        self._square_scale = 1.0
        held = [fragment for fragment in sharding.fragments() if fragment.trained]
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
        """The optimiser's own groups; learning-rate schedules write to them."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The optimiser's state, by fragment."""
        return self.optimizer.state

    @property
    def cur_scale(self) -> float:
        """What losses are multiplied by before their backward."""
        return self.loss_scaler.cur_scale

    @torch.no_grad()
    def step(self) -> None:
        """Wait for the gradients, step, and start to gather the new weights; a collective call.

        Raises:
            NonFiniteError: on every rank: the gradient of this step or the one before is not finite.
        """
        with self._waiting():
            self.sharding.finish_gradients()
        try:
            self._watch.answer()
            self._square = self._summed(self._square_of_mine())
            self._square_scale = self.cur_scale
            self._judge()
        except NonFiniteError as error:
            self._astray = error
            self.zero_grad()
            raise
        self._astray = None
        if not self.overflow:
            self._scale()
            for chunk in self.sharding.trained:
                chunk.hand_out_gradients()
            self.optimizer.step()
            self.sharding.publish()
        self.loss_scaler.update_scale(self.overflow)
        self.zero_grad()

    def _judge(self) -> None:
        """Find out whether the gradient is finite, at once or when the next step ends."""
        assert self._square is not None
        step = self._steps_done() + 1
        if not self._check_overflow:
            self._watch.ask(step, self._square, self._square_scale)
            if self._clip() and self.sharding.device.type == "cpu":
                self._watch.answer()
            return
        self.overflow = not torch.isfinite(self._awaited_norm()).item()
        self._skipped = self._skipped + 1 if self.overflow else 0
        if self._skipped > MOST_SKIPPED:
            raise astray(step, float(self._awaited_norm()))

    def check_finite(self) -> None:
        """Make sure that what was trained so far may be kept; a collective call for which the host waits.

        Raises:
            NonFiniteError: on every rank: the last gradient, a weight or its optimiser's state is not finite.
        """
        if self._astray is not None:  # weights that led there are no better for being finite
            raise self._astray
        self._watch.answer()
        held = [tensor for chunk in self.sharding.trained for tensor in chunk.held_weights]
        held += [x for state in self.state.values() for x in state.values() if isinstance(x, Tensor)]
        finite = all_finite(held, self.sharding.device)
        if dist.is_initialized():
            dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if not finite:
            raise NonFiniteError(
                f"step {self._steps_done()}: weights or the optimiser's state are no longer finite. {REMEDY}"
            )

    def restored(self) -> None:
        """Weights and state are those of a checkpoint now."""
        self._watch.forget()
        self._astray = None

    @property
    def gradient_norm(self) -> Tensor | None:
        """2-norm of the gradient of the whole model in the last step; None before the first.

        Its way to all ranks is waited for here, unless the step has needed it.
        """
        return None if self._square is None else self._square.wait().sqrt() / self._square_scale

    def _summed(self, square: Tensor) -> ReplicaSum:
        if not (self._clip() or self._check_overflow):  # it may travel while the next step begins
            return ReplicaSum(square, dist.group.WORLD if dist.is_initialized() else None)
        with self._waiting():
            return ReplicaSum(sum_now(square, **self._groups), None)

    def _awaited_norm(self) -> Tensor:
        with self._waiting():
            norm = self.gradient_norm
        assert norm is not None
        return norm

    def _square_of_mine(self) -> Tensor:
        """What this rank adds to the square of the norm; each element counts on one rank."""
        return squared_norm((chunk.counted_gradient for chunk in self.sharding.trained), self.sharding.device)

    def _scale(self) -> None:
        """Take the loss scale away, and clip."""
        factor = torch.full((), 1.0 / self.cur_scale, device=self.sharding.device)
        if clip := self._clip():
            factor *= torch.clamp(clip / (self._awaited_norm() + 1e-6), max=1.0)
        elif self.cur_scale == 1.0:
            return
        if gradients := [chunk.gradient for chunk in self.sharding.trained]:
            torch._foreach_mul_(gradients, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for chunk in self.sharding.trained:
            chunk.drop_gradient()

    def state_dict(self) -> dict[str, Any]:
        """Refused: a rank's part by position fits no other layout."""
        raise RuntimeError("use engine.save_checkpoint(), which stores by parameter name")

    load_state_dict = state_dict

    def destroy(self) -> None:
        """End the threads of the collectives."""
        self.sharding.collectives.close()
