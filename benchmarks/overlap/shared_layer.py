"""Emulated layers that ranks share: compute sleeps, and collectives are real but also take an emulated link's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.overlap.chunked import Do, chunked_strand
from benchmarks.overlap.emulator import Machine
from benchmarks.peers.emulated_stage import EmulatedStage, EmulatedWork
from weft.engine.parallel.axis import AxisGroup
from weft.engine.parallel.cut import Cut
from weft.engine.strands.yielding_group import YieldingHandle, YieldPoint
from weft.pipeline.strands.plan import Step
from weft.pipeline.strands.segments import Segment, Strand, StrandPair, WeightGradient

HIDDEN = 64
"""Elements of the hidden state."""


@dataclass
class SharedRank:
    """The state that one rank's layers share.

    Attributes:
        group: the ranks that share the layers; its operations never switch to the other strand.
        yield_point: callbacks at which this rank's strands switch.
        live: layers between the begin of their forward and the end of their input gradient; ``most_live`` is its
            maximum.
    """

    machine: Machine
    group: AxisGroup
    yield_point: YieldPoint
    live: int = 0
    most_live: int = 0

    def compute(self, segment: Segment | WeightGradient, step: Step) -> None:
        """Spend a segment's compute time."""
        self.machine.compute(segment.compute_s, segment.kind, step)

    def mean(self, tensor: Tensor, segment: Segment, step: Step) -> Tensor:
        """Return the mean of ``tensor`` over the members, once the segment's link would have carried it.

        The other strand runs meanwhile.
        """
        assert segment.link is not None
        carried = self.group.all_reduce(tensor.clone())
        transfer = self.machine.start(segment.comm_s, segment.link, step, carried)
        return YieldingHandle(transfer, self.yield_point).wait() / self.group.size

    def chunked(self, tensor: Tensor, strand: Strand, weights: tuple[WeightGradient, ...], step: Step) -> Tensor:
        """Run a strand in chunks that overlap with each other; return the mean of ``tensor`` over the members."""
        coming: deque[Any] = deque()
        for part in chunked_strand(strand, weights):
            if part.do is Do.compute:
                self.machine.compute(part.seconds, part.kind, step)
            elif part.do is Do.start:
                assert part.link is not None
                carried = self.group.all_reduce(tensor.clone()) if part.last else None
                coming.append(self.machine.start(part.seconds, part.link, step, carried))
            elif (whole := coming.popleft().wait()) is not None:
                tensor = whole / self.group.size
        return tensor

    def begin_layer(self, step: Step) -> None:
        """Record the begin of a layer: idle time of the processor ends, and a forward adds a live layer."""
        self.machine.stood_still(perf_counter())
        self.live += step is Step.forward
        self.most_live = max(self.live, self.most_live)


class SharedLayer(nn.Module):
    """A layer that runs the segments of a traced layer.

    It adds to the hidden state the mean over members of the sum of its matrices' products. Every collective of the
    forward carries this sum, and every collective of the backward its gradient. Each matrix is a real parameter to code
    that splits, delays or moves its gradient. So losses reveal operations that were left out or done twice.
    """

    def __init__(self, pair: StrandPair, rank: SharedRank, *, chunked: bool = False) -> None:
        """Create the layer from the forward, backward and weight gradients of a traced layer.

        Args:
            chunked: True if forward and backward each overlap with their own collectives, in chunks. The backward then
                includes the times of weight gradients.
        """
        super().__init__()
        self.pair, self.rank, self.chunked = pair, rank, chunked
        self.matrices = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in pair.weights)
        self.register_buffer("one", torch.ones(1, 1), persistent=False)
        for number, (matrix, weight) in enumerate(zip(self.matrices, pair.weights, strict=True)):
            nn.init.constant_(matrix.weight, 0.01 * (number + 1 + rank.group.index))
            matrix.weight.register_hook(partial(self._weight_gradient, weight))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden state after the layer, [1, `HIDDEN`] like the input."""
        self.rank.begin_layer(Step.forward)
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()  # a first layer computes its input's gradient, too
        if self.chunked:
            products = [matrix(self.one) for matrix in self.matrices]
            return _Chunked.apply(hidden, self, *products)
        added = torch.zeros(1, 1)
        # Autograd runs what was recorded last first: the last segment's nodes stand before the first's, and in each
        # the collective before the products before the compute. So gradients of matrices can be computed while the
        # segment's own collective is under way.
        for index, segment in reversed([*enumerate(self.pair.backward.segments)]):
            weights = zip(self.matrices, self.pair.weights, strict=True)
            hidden = _BackwardEnd.apply(hidden, segment, self.rank, index == len(self.pair.backward.segments) - 1)
            products = [matrix(self.one) for matrix, weight in weights if weight.after == index]
            added = added + sum(product.detach() for product in products)
            hidden = _BackwardSegment.apply(hidden, segment, self.rank, index == 0, *products)
        return _Forward.apply(hidden, added, self)

    def _weight_gradient(self, weight: WeightGradient, gradient: Tensor) -> None:
        if not self.chunked:
            self.rank.compute(weight, Step.weight)


class _Chunked(torch.autograd.Function):
    """A whole layer in chunks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: SharedLayer, *products: Tensor) -> Tensor:
        ctx.layer = layer
        added = sum(products, torch.zeros(1, 1))
        return hidden + layer.rank.chunked(added, layer.pair.forward, (), Step.forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pair, rank = ctx.layer.pair, ctx.layer.rank
        rank.begin_layer(Step.backward)
        gradient = rank.chunked(gradient, pair.backward, pair.weights, Step.backward)
        rank.live -= 1
        return gradient, None, *[gradient.sum().reshape(1, 1)] * len(pair.weights)


class _Forward(torch.autograd.Function):
    """All segments of a layer's forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, added: Tensor, layer: SharedLayer) -> Tensor:
        for segment in layer.pair.forward.segments:
            layer.rank.compute(segment, Step.forward)
            if segment.link is not None:
                added = layer.rank.mean(added, segment, Step.forward)
        return hidden + added

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _BackwardSegment(torch.autograd.Function):
    """Identity; its backward computes one segment and provides the gradient of the segment's products."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, segment: Segment, rank: SharedRank, first: bool, *products: Tensor) -> Tensor:
        ctx.segment, ctx.rank, ctx.first, ctx.products = segment, rank, first, len(products)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.first:
            ctx.rank.begin_layer(Step.backward)
        ctx.rank.compute(ctx.segment, Step.backward)
        return gradient, None, None, None, *[gradient.sum().reshape(1, 1)] * ctx.products


class _BackwardEnd(torch.autograd.Function):
    """Identity; its backward is the collective at the end of a segment, if the segment has one."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, segment: Segment, rank: SharedRank, last: bool) -> Tensor:
        ctx.segment, ctx.rank, ctx.last = segment, rank, last
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.segment.link is not None:
            gradient = ctx.rank.mean(gradient, ctx.segment, Step.backward)
        ctx.rank.live -= ctx.last
        return gradient, None, None, None


class SharedStage(EmulatedStage):
    """A virtual stage of shared layers, whose matrices are divided among the members."""

    def __init__(
        self, make: Callable[[], SharedLayer], group: AxisGroup, *, index: int, layers: Sequence[range]
    ) -> None:
        """Create a stage as `EmulatedStage` does, with layers from ``make`` that ``group`` shares."""
        super().__init__(EmulatedWork(hidden_bytes=4 * HIDDEN), index=index, layers=layers, make=make)
        size = group.size
        self.cuts = {name: Cut((size, 1), 0, group.index, size) for name, _ in self.named_global_parameters()}

    def forward(self, hidden: Tensor | None, batch: Mapping[str, Tensor], num_items: Tensor | None = None) -> Tensor:
        """Return the next stage's hidden state, or on the last stage a loss over ``num_items``."""
        if hidden is None:
            hidden = first_hidden(batch["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.is_last:
            return hidden
        loss = shared_loss(hidden)
        return loss if num_items is None else loss / num_items


def first_hidden(ids: Tensor) -> Tensor:
    """Return the input of a micro-batch, [1, `HIDDEN`]; all micro-batches of a step differ."""
    return ids[:, :1].float().expand(1, HIDDEN) / 10


def shared_loss(hidden: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return a scalar whose gradient depends on ``hidden``."""
    return hidden.flatten()[0].square()


def micro_batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Yield the same ``count`` micro-batches endlessly."""
    while True:
        for number in range(count):
            ids = torch.full((1, 2), number + 1)
            yield {"input_ids": ids, "labels": ids}
