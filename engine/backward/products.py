"""Products of an activation and a parameter, whose two gradients can be computed separately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_variadic


class Product(ABC):
    """One call of a torch function that multiplies an activation by parameters."""

    saved: tuple[Tensor, ...] = ()
    """Tensors besides the activation that the forward keeps for the backward."""

    @property
    @abstractmethod
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors whose gradient is deferred: parameters, or views of parameters."""

    @abstractmethod
    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the activation, from the gradient of the product."""

    @abstractmethod
    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of ``parameters``, in the same order."""


@dataclass(frozen=True, eq=False)
class MatrixProduct(Product):
    """``activation @ matrix + bias`` over the last dimension: linear layers and Conv1D."""

    matrix: Tensor
    """[in, out], column-major for nn.Linear, which stores the transpose."""
    bias: Tensor | None
    """[out]"""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors that wait."""
        return (self.matrix,) if self.bias is None else (self.matrix, self.bias)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Map [..., out] to [..., in]."""
        return gradient @ self.matrix.t()

    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of shape [in, out], and of shape [out] if there is a bias."""
        rows, out = activation.flatten(0, -2), gradient.flatten(0, -2)
        # In the parameter's own memory layout, so that accumulating needs no copy.
        column_major = self.matrix.stride(0) == 1
        matrix = (out.t() @ rows).t() if column_major else rows.t() @ out
        return (matrix,) if self.bias is None else (matrix, out.sum(0))


@dataclass(frozen=True, eq=False)
class GroupedProduct(Product):
    """Tokens sorted by expert, with each group multiplied by its expert's matrix: fused mixture-of-experts."""

    matrices: Tensor
    """[experts, in, out]"""
    offsets: Tensor
    """[experts]: the row after each group's last."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors that wait."""
        return (self.matrices,)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Map [tokens, out] to [tokens, in]."""
        return F.grouped_mm(gradient, self.matrices.transpose(1, 2), offs=self.offsets)

    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return a gradient of shape [experts, in, out]."""
        if self.matrices.stride(1) == 1:
            return (F.grouped_mm(gradient.t(), activation, offs=self.offsets).transpose(1, 2),)
        return (F.grouped_mm(activation.t(), gradient, offs=self.offsets),)


@dataclass(frozen=True, eq=False)
class Lookup(Product):
    """An embedding: a product of one-hot vectors and the weights."""

    table: Tensor
    """[tokens, width]"""
    padding_idx: int
    """Row without a gradient. -1 means none."""
    scale_grad_by_freq: bool
    """Divide a row's gradient by how often it was looked up."""

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors that wait."""
        return (self.table,)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Not called, because token ids have no gradient."""
        raise AssertionError("token ids have no gradient")

    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return a gradient of shape [vocabulary, width]."""
        return (
            torch.ops.aten.embedding_dense_backward(
                gradient, activation, len(self.table), self.padding_idx, self.scale_grad_by_freq
            ),
        )


class ComputedProduct(Product):
    """A product that has a forward, which `multiply` runs. No torch function computes it."""

    @abstractmethod
    def forward(self, activation: Tensor) -> Tensor:
        """Compute the product without recording gradients, and set ``saved``."""


def multiply(activation: Tensor, product: ComputedProduct) -> Tensor:
    """Compute a product with gradients. It can be overridden as torch functions can, so a split backward defers it."""
    if has_torch_function_variadic(activation):  # true within a mode as well
        return handle_torch_function(multiply, (activation,), activation, product)
    if not torch.is_grad_enabled():
        return product.forward(activation)
    return _Multiply.apply(activation, product, *product.parameters)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, product: ComputedProduct, *parameters: Tensor) -> Tensor:
        result = product.forward(activation)
        waits = (activation,) if any(ctx.needs_input_grad[2:]) else ()  # as torch's products save it
        ctx.save_for_backward(*waits, *product.saved)
        ctx.product = product
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # before the input gradient reuses the memory of others
        product, needed = ctx.product, ctx.needs_input_grad
        below = product.input_gradient(gradient) if needed[0] else None
        own = (None,) * len(product.parameters)
        if any(needed[2:]):
            own = product.parameter_gradients(saved[0].detach(), gradient)
        return below, None, *own


def base_parameter(tensor: Tensor) -> nn.Parameter | None:
    """Return the trainable parameter that ``tensor`` is, or that it is a view of, or None.

    The result is None for a tensor that is computed from a parameter. The graph of this computation is freed in the
    input-gradient backward, so the gradient cannot be deferred.
    """
    if not tensor.requires_grad:
        return None
    base = tensor if tensor._base is None else tensor._base
    return base if isinstance(base, nn.Parameter) else None


Match = tuple[Tensor, Product] | None
"""The activation and the product of a call. None leaves the call unchanged."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Match:
    return _matmul(input, weight.t(), bias)


def _matmul(input: Tensor, other: Tensor, bias: Tensor | None = None) -> Match:
    return (input, MatrixProduct(other, bias)) if other.dim() == 2 and input.dim() >= 2 else None


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Match:
    return (mat1, MatrixProduct(mat2, input)) if beta == alpha == 1 and input.dim() == 1 else None


def _grouped_mm(input: Tensor, mat2: Tensor, offs: Tensor | None = None, **rest: Any) -> Match:
    plain = all(value is None for value in rest.values())
    return (input, GroupedProduct(mat2, offs)) if plain and offs is not None and mat2.dim() == 3 else None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Match:
    if max_norm is not None or sparse:
        return None
    padding = -1 if padding_idx is None else padding_idx % len(weight)
    return input, Lookup(weight, padding, scale_grad_by_freq)


_MATCHERS: Mapping[Callable[..., Tensor], Callable[..., Match]] = MappingProxyType(
    {
        F.linear: _linear,
        F.embedding: _embedding,
        torch.addmm: _addmm,
        torch.matmul: _matmul,
        torch.mm: _matmul,
        torch.Tensor.matmul: _matmul,
        torch.Tensor.__matmul__: _matmul,
        torch._grouped_mm: _grouped_mm,
        multiply: lambda activation, product: (activation, product),
    }
)


def match(function: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Match:
    """Describe a call of a torch function as a product whose weight gradient can be deferred.

    Returns:
        The match, or None if ``function`` is not a product with a trainable parameter (or a view of one), or if
        autocast would cast its operands.
    """
    matcher = _MATCHERS.get(function)
    if matcher is None or not torch.is_grad_enabled():
        return None
    found = matcher(*args, **kwargs)
    if found is None or (not found[0].is_meta and torch.is_autocast_enabled(found[0].device.type)):
        return None
    return found if all(base_parameter(p) is not None for p in found[1].parameters) else None
