"""Emulated compute: layers that sleep for the time of their operations, but are real to autograd and to engines.

So a dozen ranks run concurrently on two cores, while schedule, engine and network are
the real ones (NeuronaBox section 3 emulates the rest of a job in the same spirit).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor, nn

from weft.conf.host.processes import set_timer_slack
from weft.engine.parallel.cut import Cut
from weft.pipeline.costs import CostModel, LinkCost, StageCost


@dataclass(frozen=True, kw_only=True)
class EmulatedWork:
    """The cost of one layer for one micro-batch."""

    forward_s: float = 0.01
    """Seconds of a forward."""
    input_s: float = 0.01
    """Seconds of an input-gradient backward."""
    weight_s: float = 0.01
    """Seconds of a weight-gradient backward; a full backward takes input_s + weight_s."""
    hidden_bytes: int = 2**20
    """Size of the hidden state that layers hand on."""
    weight_elements: int = 1
    """Number of parameters of a layer, which are reduced, sharded and stepped."""

    def costs(
        self, num_layers: int, num_stages: int, *, local: LinkCost | None = None, wan: LinkCost | None = None
    ) -> CostModel:
        """Return the costs of ``num_layers`` such layers, cut evenly into ``num_stages`` virtual stages.

        Raises:
            ValueError: the layers cannot be cut evenly.
        """
        stage = self.cost(layers_per_stage(num_layers, num_stages))
        return CostModel(stages=(stage,) * num_stages, local=local or LinkCost(), wan=wan or LinkCost())

    def cost(self, num_layers: int) -> StageCost:
        """Return the cost of a virtual stage of ``num_layers`` such layers."""
        return StageCost(
            forward_s=self.forward_s * num_layers,
            input_s=self.input_s * num_layers,
            weight_s=self.weight_s * num_layers,
            activation_bytes=self.hidden_bytes,
            output_bytes=self.hidden_bytes,
        )


def layers_per_stage(num_layers: int, num_stages: int) -> int:
    """Return the number of layers of each virtual stage. Raise ValueError if the layers cannot be cut evenly."""
    if num_layers % num_stages:
        raise ValueError(f"layers={num_layers}: not a multiple of {num_stages} virtual stages; choose one that is")
    return num_layers // num_stages


WAKE_UP_S = 1e-4
"""Seconds by which a sleeper may wake up late without timer slack; 0.05 to 0.07 ms was usual for 10 ms of work."""


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_KEPT_BYTES = 1 << 30
_LIBC = ctypes.CDLL(None)


@cache
def keep_freed_memory() -> None:
    """Make glibc keep freed tensor memory in this process, as a GPU's allocator does.

    Otherwise each product's memory is returned to Linux and faulted in again. With nine ranks on two cores this
    took 2 to 3 ms of a layer's weight gradient.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        _LIBC.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


def pause(seconds: float) -> None:
    """Wait ``seconds``, to within some microseconds: sleep until just before the end, then poll the clock."""
    deadline = perf_counter() + seconds
    set_timer_slack(0.0)
    while (left := deadline - WAKE_UP_S - perf_counter()) > 0:
        sleep(left)
    while perf_counter() < deadline:
        pass


class EmulatedLayer(nn.Module):
    """A layer that returns its input unchanged, after the time of its forward, input gradient or weight gradient.

    It has a linear layer of one column, so code that splits, delays or repeats the weight
    gradient of an nn.Linear does the same here. A hook on the weight spends the time of the weight gradient, so it is
    spent wherever that gradient is accumulated: in B, or in W. The time of torch's own
    operations is included, because kernel launches are hidden behind a real layer's compute.
    """

    def __init__(self, work: EmulatedWork) -> None:
        super().__init__()
        keep_freed_memory()
        self.work = work
        self.factor: Callable[[str], float] | None = None
        """Returns the factor by which an operation (F, I or W) takes longer than in ``work``."""
        self.spans: list[tuple[str, float, float]] | None = None
        """A list to note each computation in: its letter, and begin and end by `perf_counter`."""
        self.linear = nn.Linear(1, work.weight_elements, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.register_buffer("one", torch.ones(1, 1), persistent=False)
        self.linear.weight.register_hook(self._weight_gradient)
        self._since: float | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, of any shape, after ``forward_s``."""
        self.begin()
        if not hidden.requires_grad and torch.is_grad_enabled():
            hidden = hidden.detach().requires_grad_()  # a first layer computes its input's gradient too
        hidden = _Join.apply(_InputGradient.apply(hidden, self), self.product(), self)
        self.spend("F")
        return hidden

    def product(self) -> Tensor:
        """Return the weight's product; its gradient takes the time of W."""
        return self.linear(self.one)

    def begin(self) -> None:
        """Restart the clock from which the next `spend` counts."""
        self._since = perf_counter()

    def spend(self, op: str) -> None:
        """Wait until the time of ``op`` (F, I or W) has passed since `begin`."""
        now = perf_counter()
        start = now if self._since is None else self._since
        seconds = {"F": self.work.forward_s, "I": self.work.input_s, "W": self.work.weight_s}[op]
        pause(seconds * (1.0 if self.factor is None else self.factor(op)) - (now - start))
        # A weight gradient within a backward is followed by the input gradient; nothing else goes on.
        self._since = perf_counter() if op == "W" and self._since is not None else None
        if self.spans is not None:
            self.spans.append((op, start, perf_counter()))

    def _weight_gradient(self, gradient: Tensor) -> None:
        self.spend("W")


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor on the same memory that is no view to autograd: torch's pipelining detaches outputs in place."""
    return tensor.new_empty(0).set_(tensor.detach())


class _InputGradient(torch.autograd.Function):
    """Identity; the backward takes the input gradient's time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.layer = layer
        return _alias(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        below = _alias(gradient)  # of its own, as from a real layer: autograd need not copy it
        ctx.layer.spend("I")
        return below, None


class _Join(torch.autograd.Function):
    """Return the hidden state unchanged, as if it depended on the weight's product; a layer's backward begins here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, product: Tensor, layer: EmulatedLayer) -> Tensor:
        ctx.save_for_backward(hidden, product)
        ctx.layer = layer
        return _alias(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.layer.begin()
        _, product = ctx.saved_tensors
        return gradient, torch.ones_like(product), None


def emulated_loss(hidden: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return a scalar that depends on ``hidden``."""
    return hidden.flatten()[:1].sum()


def emulated_hidden(work: EmulatedWork) -> Tensor:
    """Return the hidden state that enters the first layer: [1, hidden_bytes / 4] zeros."""
    return torch.zeros(1, work.hidden_bytes // 4)


class EmulatedStage(nn.Module):
    """A virtual stage of emulated layers, with the interface of `weft.engine.stages.cutting.stage.Stage`."""

    hf_model = None
    """No model whose default positions would be added to a batch."""

    def __init__(self, work: EmulatedWork, *, index: int, layers: Sequence[range]) -> None:
        super().__init__()
        self.index = index
        self.is_last = index == len(layers) - 1
        self.tied: frozenset[str] = frozenset()
        self.cuts: dict[str, Cut] = {}
        self.work = work
        self.first_layer = layers[index].start
        self.layers = nn.ModuleList(EmulatedLayer(work) for _ in layers[index])

    def forward(self, hidden: Tensor | None, batch: Mapping[str, Tensor], num_items: Tensor | None = None) -> Tensor:
        """Return the next stage's hidden state, or on the last stage a loss over ``num_items``."""
        if hidden is None:
            hidden = emulated_hidden(self.work)
        for layer in self.layers:
            hidden = layer(hidden)
        if not self.is_last:
            return hidden
        loss = emulated_loss(hidden)
        return loss if num_items is None else loss / num_items

    def blocks(self) -> list[nn.Module]:
        """Return the layers, in order."""
        return list(self.layers)

    def hidden_spec(self, batch: Mapping[str, Tensor], *, leaving: bool = False) -> tuple[torch.Size, torch.dtype]:
        """Return the shape and dtype of the hidden state, which are the same at every boundary."""
        return torch.Size((1, self.work.hidden_bytes // 4)), torch.float32

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their name in the whole model."""
        for number, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                yield f"layers.{self.first_layer + number}.{name}", parameter
