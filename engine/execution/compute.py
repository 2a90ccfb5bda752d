"""The compute actions of a rank: forwards and backwards of its virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.backward import SplitBackward
from weft.engine.backward.offload import HostMemory, MovableActivations
from weft.engine.execution.step_state import StepState, key
from weft.engine.stages.cutting.context import whole_batch
from weft.engine.stages.cutting.stage import HEAD, HEAD_WEIGHT, Stage
from weft.pipeline.action import Action, Op
from weft.pipeline.placement import Placement


@dataclass(kw_only=True, eq=False)
class Compute:
    """Runs F, B, I and W. If a rank holds the next stage, too, it passes tensors on in a dictionary.

    Attributes:
        seed_gradient: returns the gradient of a loss, which is the loss scale.
        around: returns the context in which an action computes, in which the stage's weights are complete.
        host_bytes_per_s: rate of copies between a CPU's memory and itself, which emulates offload. 0 is as fast as
            possible.
        seed: seeds the generators for a training forward, by its micro-batch.
    """

    stages: Mapping[int, Stage]
    placement: Placement
    seed_gradient: Callable[[Tensor], Tensor]
    around: Callable[..., AbstractContextManager[None]] = lambda *_: nullcontext()
    seed: Callable[[Action], None] = lambda _: None
    host_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        self._backward = {index: SplitBackward(stage) for index, stage in self.stages.items()}
        self._host_memory: HostMemory | None = None
        self._last = self.placement.num_stages - 1
        self._last_state: StepState | None = None
        """The step in which the last stage runs."""
        self._weighed: StepState | None = None
        """The step for which the head's weight was examined."""
        if self._last in self.stages:
            last = self.stages[self._last]
            # Wait for the count only before the last block, so that earlier layers hide its transfer.
            block = (last.blocks() or [last])[-1]
            block.register_forward_pre_hook(self._before_last_block)
            model = getattr(last, "hf_model", None)  # stages of tests and benchmarks have none
            if model is not None and block is model.get_output_embeddings():
                block.register_forward_hook(self._after_head, prepend=True)  # before ZeRO-3 releases the weight

    def forward(self, state: StepState, action: Action) -> None:
        """Run ``F``: consume an input, and store an output or a loss."""
        stage, microbatch = key(action)
        batch = state.batches[microbatch]
        hidden = state.inputs.pop((stage, microbatch)) if stage else None
        module = self.stages[stage]
        if not state.training:
            with torch.no_grad(), self.around(action):
                self._evaluate(state, module, hidden, microbatch)
            return
        if hidden is not None:
            hidden = hidden.detach().requires_grad_()
        counting = self._counting_of(state, microbatch) if stage == self._last else {}
        self.seed(action)
        with self.around(action):
            output, state.saved[stage, microbatch] = self._backward[stage].forward(
                lambda: module(hidden, batch, **counting),
                hidden,
                split=(stage, microbatch) in state.split,
                movable=(stage, microbatch) in state.offloaded,
                shared=[tensor for tensor in batch.values() if isinstance(tensor, Tensor)],
            )
        state.note_peak()
        if (movable := state.saved[stage, microbatch].movable) is not None:
            movable.begin_offload(self._host(output.device))
        if stage == self._last:
            assert state.num_items is None or state.num_items.is_known, "a loss before its tokens were counted"
            state.losses[microbatch] = output.detach()
            state.gradients[stage, microbatch] = self.seed_gradient(output)
        else:
            state.note_hidden(stage, output)
            self._pass_on(state, stage, microbatch, output.detach())

    def _evaluate(self, state: StepState, module: Stage, hidden: Tensor | None, microbatch: int) -> None:
        batch = state.batches[microbatch]
        if module.index < self._last:
            self._pass_on(state, module.index, microbatch, module(hidden, batch))
            return
        if state.of_logits is not None:
            logits = module.logits(hidden, batch)
            state.of_each[microbatch] = state.of_logits(logits, whole_batch(batch))
        if state.num_items is not None:
            state.losses[microbatch] = module(hidden, batch, **self._counting_of(state, microbatch))

    def _counting_of(self, state: StepState, microbatch: int) -> dict[str, Any]:
        """Return the last stage's arguments: the step's number of items, and whether this micro-batch has items."""
        self._last_state = state
        items = state.num_items.items if state.num_items is not None else None
        return {"num_items": items} | ({"counts": False} if microbatch in state.empty else {})

    def _before_last_block(self, block: nn.Module, inputs: tuple[Any, ...]) -> None:
        state = self._last_state
        if state is not None and state.num_items is not None:
            state.num_items.wait()
        if state is not None and state.training and inputs and isinstance(inputs[0], Tensor):
            state.note_hidden(self._last, inputs[0])

    def _after_head(self, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        state = self._last_state
        if state is None or not state.training:
            return
        if isinstance(output, Tensor):
            state.note_hidden(HEAD, output)
        weight, first = getattr(block, "weight", None), self._weighed is not state
        if first and isinstance(weight, Tensor):  # the same for all micro-batches of a step
            self._weighed = state
            state.note_hidden(HEAD_WEIGHT, weight)

    def offload(self, state: StepState, action: Action) -> None:
        """Run ``OFFLOAD``: wait until the host has the saved tensors, and free them here."""
        self._movable(state, action).end_offload()

    def reload(self, state: StepState, action: Action) -> None:
        """Run ``RELOAD``: start to copy the saved tensors back."""
        self._movable(state, action).begin_reload()
        state.note_peak()

    @staticmethod
    def _movable(state: StepState, action: Action) -> MovableActivations:
        movable = state.saved[key(action)].movable
        assert movable is not None
        return movable

    def _host(self, device: torch.device) -> HostMemory:
        self._host_memory = self._host_memory or HostMemory(device, self.host_bytes_per_s)
        return self._host_memory

    def _pass_on(self, state: StepState, stage: int, microbatch: int, output: Tensor) -> None:
        local = stage + 1 in self.stages
        (state.inputs if local else state.outputs)[stage + local, microbatch] = output

    def backward(self, state: StepState, action: Action) -> None:
        """Run ``B`` (all gradients) or ``I`` (the input gradient, keeping what ``W`` needs)."""
        with self.around_backward(state, action):
            self.begin_backward(state, action)
            self.end_backward(state, action)

    def around_backward(self, state: StepState, action: Action) -> AbstractContextManager[None]:
        """Return the context of ``around`` for a backward, with the number of gradients that it will accumulate."""
        return self.around(action, state.saved[key(action)].coming)

    def begin_backward(self, state: StepState, action: Action) -> None:
        """Compute the input gradient of ``B`` or ``I``, and pass it to the previous stage."""
        saved, gradient = state.saved[key(action)], state.gradients.pop(key(action))
        self._pass_back(state, action, self._backward[action.stage].input_backward(saved, gradient))

    def end_backward(self, state: StepState, action: Action) -> None:
        """End ``B`` by computing the remaining weight gradients, or end ``I``."""
        if action.op is Op.B:
            self._backward[action.stage].weight_backward(state.saved.pop(key(action)))
        else:
            state.note_peak()

    def weight_backward(self, state: StepState, action: Action) -> None:
        """Run ``W``: compute the weight gradients that ``I`` has deferred."""
        with self.around_backward(state, action):
            self._backward[action.stage].weight_backward(state.saved.pop(key(action)))

    def _pass_back(self, state: StepState, action: Action, gradient: Tensor | None) -> None:
        stage, microbatch = key(action)
        if stage == 0:
            return
        assert gradient is not None
        local = stage - 1 in self.stages
        (state.gradients if local else state.input_gradients)[stage - local, microbatch] = gradient
