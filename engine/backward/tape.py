"""The tape: the deferred weight gradients of one micro-batch."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.engine.backward.products import Product, base_parameter


class DeferredProduct(NamedTuple):
    """A product whose activation gradient has been computed and whose weight gradient is deferred."""

    product: Product
    activation: Tensor
    gradient: Tensor

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter under which the tape stores the product. A bias belongs to its matrix."""
        parameter = base_parameter(self.product.parameters[0])
        assert parameter is not None
        return parameter

    def seed(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Compute the parameters' gradients, and return pairs of parameter (or view) and gradient."""
        return zip(
            self.product.parameters, self.product.parameter_gradients(self.activation, self.gradient), strict=True
        )


class Tape:
    """Products of one micro-batch on one virtual stage, in the order of their backwards."""

    def __init__(self) -> None:
        self._deferred: dict[nn.Parameter, list[DeferredProduct]] = {}
        self._factors: dict[nn.Parameter, set[nn.Parameter]] = {}
        self._recorded: Counter[nn.Parameter] = Counter()
        self._recomputed: Counter[nn.Parameter] = Counter()
        self._in_backward = False
        self._ready: deque[nn.Parameter] = deque()
        self.parameters: set[nn.Parameter] = set()
        """Parameters whose gradient is deferred to ``accumulate``."""

    def record(self, compute: Callable[[], Tensor], activation: Tensor, product: Product) -> Tensor:
        """Run a product so that its backward computes only the activation's gradient."""
        factors = [parameter for factor in product.parameters if (parameter := base_parameter(factor)) is not None]
        self.parameters.update(factors)
        self._factors.setdefault(factors[0], set()).update(factors)
        (self._recomputed if self._in_backward else self._recorded)[factors[0]] += 1
        # The parameters are not inputs of the autograd node: without an anchor, a product of an
        # activation that needs no gradient would have no backward.
        anchor = None if activation.requires_grad else torch.empty(0, requires_grad=True, device=activation.device)
        return _Deferred.apply(activation, anchor, compute, product, self)

    def begin_backward(self) -> None:
        """Treat the products that follow as recomputed ones, because a backward begins."""
        self._in_backward = True

    def defer(self, product: DeferredProduct) -> None:
        """Defer the weight gradients of a product to ``play`` or ``accumulate``."""
        parameter = product.parameter
        products = self._deferred.setdefault(parameter, [])
        products.append(product)
        # A recomputed layer has as many products as its forward recorded, or none were recorded without gradients.
        if len(products) == (self._recorded[parameter] or self._recomputed[parameter]):
            self._ready.append(parameter)

    @property
    def coming(self) -> Counter[nn.Parameter]:
        """Count the gradients of each parameter that ``accumulate`` and ``play`` will accumulate."""
        filed = self._deferred if self._in_backward else self._recorded
        return Counter(parameter for key in filed for parameter in self._factors[key])

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory of the deferred activations and gradients."""
        products = (product for of_parameter in self._deferred.values() for product in of_parameter)
        storages = (t.untyped_storage() for product in products for t in (product.activation, product.gradient))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def accumulate(self) -> None:
        """Compute the deferred weight gradients, and accumulate them as any backward does.

        The gradients of each parameter go through one call of autograd's engine. So tensor hooks see
        them, and post-accumulate hooks run exactly once per parameter and micro-batch: DeepSpeed's
        BF16_Optimizer with ``immediate_grad_update`` and its ZeRO optimisers register such hooks, and
        otherwise DeepSpeed reads ``.grad``.
        """
        self._ready.clear()
        for parameter in list(self._deferred):
            _accumulate(self._deferred.pop(parameter))

    def play(self) -> bool:
        """Accumulate the gradients of the next parameter with all products deferred, while the backward runs.

        Returns:
            True if there was such a parameter.
        """
        if not self._ready:
            return False
        _accumulate(self._deferred.pop(self._ready.popleft()))
        return True


def _accumulate(products: list[DeferredProduct]) -> None:
    seeds = [seed for product in products for seed in product.seed()]
    products.clear()
    torch.autograd.backward([factor for factor, _ in seeds], [gradient for _, gradient in seeds])


class _Deferred(torch.autograd.Function):
    """A product whose backward records the weight gradients on the tape."""

    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, anchor: Tensor | None, compute: Callable[[], Tensor], product: Product, tape: Tape
    ) -> Tensor:
        result = compute()
        ctx.save_for_backward(activation, *product.saved)
        ctx.product, ctx.tape = product, tape
        # some models change the output in place, which autograd forbids for a view that is created here
        return torch.ops.aten._unsafe_view(result, result.shape) if result._is_view() else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        activation, *_ = ctx.saved_tensors
        ctx.tape.defer(DeferredProduct(ctx.product, activation.detach(), gradient))
        below = ctx.product.input_gradient(gradient) if ctx.needs_input_grad[0] else None
        return below, None, None, None, None
