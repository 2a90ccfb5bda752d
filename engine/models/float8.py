"""fp8 linear layers by torchao's recipes, as products of the split backward.

Outputs and gradients are those of torchao's `Float8Linear`, bit for bit. It computes both gradients in one backward,
so only its casts and its products are used. Each cast scales a tensor by its own largest value. Saved for the backward
are the same bf16 tensors as without fp8, because other operations share most of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.conf.host.float8 import float8_obstacle
from weft.conf.schema import Float8
from weft.engine.backward.products import ComputedProduct, multiply
from weft.engine.models.skeleton import decoder_layers
from weft.engine.parallel.experts import expert_modules

_log = logging.getLogger(__name__)
MULTIPLE = 16
"""fp8 products need sizes that are multiples of this."""


@dataclass(frozen=True, eq=False)
class Float8Product(ComputedProduct):
    """A linear layer in fp8.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
        recipe: torchao's name of a recipe.
    """

    weight: Tensor
    bias: Tensor | None
    recipe: str

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The factors that wait."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def forward(self, activation: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return torch.ops.weft.float8_linear(activation, self.weight, self.bias, self.recipe)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Map [..., out] to [..., in]."""
        recipe, rows = _recipe(self.recipe), gradient.flatten(0, -2)
        below = recipe.cast(rows, "grad_output", -1) @ recipe.cast(self.weight.t(), "weight_for_grad_input", -1).t()
        return below.view(*gradient.shape[:-1], below.shape[-1])

    def parameter_gradients(self, activation: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of shape [out, in], and of shape [out] if there is a bias."""
        recipe, rows, out = _recipe(self.recipe), activation.flatten(0, -2), gradient.flatten(0, -2)
        matrix = recipe.cast(out, "grad_output_for_grad_weight", 0).t() @ recipe.cast(rows, "input_for_grad_weight", 0)
        return (matrix,) if self.bias is None else (matrix, gradient.sum_to_size(self.bias.shape))


def _float8_linear(activation: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    recipe, rows = _recipe(name), activation.flatten(0, -2)
    result = recipe.cast(rows, "input", -1) @ recipe.cast(weight.t(), "weight", 0)
    if bias is not None:
        result.add_(bias)
    return result.view(*activation.shape[:-1], len(weight))


# One operation, so that recomputation of element-wise operations keeps its result and repeats no cast.
_LIBRARY = torch.library.Library("weft", "DEF")
_LIBRARY.define("float8_linear(Tensor activation, Tensor weight, Tensor? bias, str name) -> Tensor")
_LIBRARY.impl("float8_linear", _float8_linear, "CompositeExplicitAutograd")


@cache
def _recipe(name: str) -> _Recipe:
    return _Recipe(name)


class _Recipe:
    """torchao's casts of one recipe. It is imported here, because it is not always installed."""

    def __init__(self, name: str) -> None:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        self._config = config = Float8LinearConfig.from_recipe_name(name)
        accumulations = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        # zeros fill the inner dimension, which is the number of rows in a weight gradient
        products = (ScaledMMConfig(False, each.use_fast_accum, False, True) for each in accumulations)
        self._products = LinearMMConfig(*products)

    def cast(self, matrix: Tensor, use: str, dim: int) -> Tensor:
        """Cast a matrix for one of its uses, unless the recipe does not. ``dim`` is summed over in the product."""
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        cast: Any = getattr(self._config, f"cast_config_{use}")
        if cast.scaling_type is ScalingType.DISABLED:
            return matrix
        return hp_tensor_to_float8_dynamic(
            matrix,
            cast.target_dtype,
            self._products,
            gemm_input_role=GemmInputRole(use.partition("_for_")[0]),
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )


def use_float8(model: PreTrainedModel, recipe: Float8, device: torch.device) -> int:
    """Let the linear layers of a model, or of a part of one, compute in fp8. Return their number.

    Raises:
        ValueError: this device has no fp8 products, or the weights are quantised.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if obstacle := float8_obstacle(device.type != "cpu", capability):
        raise ValueError(f"model.float8={recipe.value}: {obstacle}")
    found, skipped = 0, set()
    for name, layer in _linear_layers(model):
        if not layer.weight.is_floating_point():
            raise ValueError(
                f"model.float8={recipe.value}: the weights of {name} are quantised already; set model.float8=none, or "
                "give a model that is not quantised"
            )
        if _fits(layer):
            layer.forward = partial(_forward, layer, recipe.value)
            found += 1
        else:
            skipped.add(f"{re.sub('[.][0-9]+[.]', '.*.', name)} {list(layer.weight.shape)}")
    if skipped:
        _log.info("model.float8=%s: not multiples of %d: %s", recipe.value, MULTIPLE, ", ".join(sorted(skipped)))
    return found


def require_float8(model: PreTrainedModel, recipe: Float8) -> None:
    """Check that a model, which may be on the meta device, has a linear layer for fp8.

    Raises:
        ValueError: it has none.
    """
    if not any(_fits(layer) for _, layer in _linear_layers(model)):
        raise ValueError(
            f"model.float8={recipe.value}: the decoder layers of {type(model).__name__} have no nn.Linear whose sizes "
            f"are multiples of {MULTIPLE}; set model.float8=none"
        )


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers inside of decoder layers, without adapters and routers, which are small."""
    layers = decoder_layers(model)
    routing = {path.rpartition(".")[0] for path, _ in expert_modules(model)}
    for name, module in model.get_submodule(layers).named_modules(prefix=layers):
        is_small = ".lora_" in name or "router" in name or name.rpartition(".")[0] in routing
        if isinstance(module, nn.Linear) and not is_small:
            yield name, module


def _fits(layer: nn.Linear) -> bool:
    return type(layer) is nn.Linear and all(size % MULTIPLE == 0 for size in layer.weight.shape)


def _forward(layer: nn.Linear, recipe: str, x: Tensor) -> Tensor:
    if not x.dtype == layer.weight.dtype == torch.bfloat16:  # some models keep some layers in fp32
        return F.linear(x, layer.weight, layer.bias)
    return multiply(x, Float8Product(layer.weight, layer.bias, recipe))
