"""A rank alone whose group only pretends to have other members, with collectives in flight for a while; and layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.comm.channel import Handle
from weft.comm.collectives.executors import InOrderExecutor, Pending, completed
from weft.engine.backward import SplitBackward
from weft.engine.backward.split import SavedForward
from weft.engine.parallel import functions
from weft.engine.strands.pair import PairRunner
from weft.engine.strands.yielding_group import YieldingGroup
from weft.pipeline.strands.plan import SegmentPlan

CYCLES = 1_000_000
"""Cycles of a GPU for a collective: half a millisecond."""


@dataclass(frozen=True)
class InFlight:
    """The handle of something that an executor runs."""

    pending: Pending

    def wait(self) -> Tensor:
        """On a GPU only the current stream waits."""
        return self.pending.result()


@dataclass(frozen=True)
class PretendedGroup:
    """The first of two members, of which the other always holds the same as this one."""

    executor: InOrderExecutor
    axis: str = "tensor"
    size: int = 2
    index: int = 0

    def all_gather(self, shard: Tensor) -> Handle:
        return self._start(shard, lambda tensor: torch.cat([tensor, tensor]))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """Twice the first half."""
        return self._start(tensor, lambda whole: whole.chunk(2)[0] * 2)

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._start(tensor, lambda whole: whole.mul_(2))

    def maximum(self, tensor: Tensor) -> Handle:
        return self._start(tensor, lambda whole: whole)

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        return self._start(tensor, lambda whole: whole.clone())

    def shift(self, tensor: Tensor) -> Handle:
        return self._start(tensor, lambda whole: whole.clone())

    def _start(self, tensor: Tensor, work: Callable[[Tensor], Tensor]) -> Handle:
        def late(ready: Tensor) -> Tensor:
            torch.cuda._sleep(CYCLES) if ready.is_cuda else sleep(1e-4)
            return work(ready)

        return InFlight(self.executor.submit(late, completed(tensor)))


class Layers(nn.Module):
    """Blocks under tensor and sequence parallelism: hidden states [B, S / members, H]."""

    def __init__(self, group: YieldingGroup, width: int, *, layers: int = 2, dropout: float, again: bool) -> None:
        super().__init__()
        self.group, self.again = group, again
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden state behind the blocks; with ``again`` each is computed again in the backward."""
        for number in range(len(self.up)):
            block = self.block, number, hidden
            hidden = checkpoint(*block, use_reentrant=False) if self.again else self.block(number, hidden)
        return hidden

    def block(self, number: int, hidden: Tensor) -> Tensor:
        wide = torch.tanh(self.up[number](functions.gather(self.group, hidden, 1)))
        return hidden + self.dropout(functions.scatter_sum(self.group, self.down[number](wide), 1))


@dataclass(frozen=True)
class Pretended:
    """Steps of a rank alone: the backward of one micro-batch with the forward of the next, and their results.

    Attributes:
        device: of all tensors.
        executor: of collectives.
    """

    device: torch.device
    executor: InOrderExecutor
    runner: PairRunner
    width: int = 64
    dropout: float = 0.0
    again: bool = False

    def results(self, plan: SegmentPlan | None, microbatches: int = 4) -> list[Tensor]:
        """Outputs, input gradients, weight gradients and random numbers afterwards; without a plan no pair is one."""
        torch.manual_seed(3)
        group = YieldingGroup(PretendedGroup(self.executor), self.runner.yield_point)
        with self.device:  # a copy from host memory would make the host wait
            model = Layers(group, self.width, dropout=self.dropout, again=self.again)
        split = SplitBackward(model)
        inputs = torch.randn(microbatches, 2, 8, self.width, device=self.device)
        seed = torch.full_like(inputs[0], 0.5)
        hidden = [tensor.clone().requires_grad_() for tensor in inputs]
        kept: list[Tensor] = []

        def forward(number: int) -> SavedForward:
            output, saved = split.forward(lambda: model(hidden[number]), hidden[number])
            kept.append(output.detach().clone())
            return saved

        saved = forward(0)
        for number in range(1, microbatches):
            if plan is None:
                split.input_backward(saved, seed)
                split.weight_backward(saved)
                saved = forward(number)
                continue
            before = saved
            saved, _ = self.runner.run(
                plan,
                lambda number=number: forward(number),
                lambda before=before: split.input_backward(before, seed),
                before.tape.play,
            )
            split.weight_backward(before)
        split.full_backward(saved, seed)
        split.remove()
        gradients = [tensor.grad for tensor in (*hidden, *model.parameters())]
        return [*kept, *gradients, torch.rand(4, device=self.device)]
