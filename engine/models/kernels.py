"""Fused kernels of Liger-Kernel for the modules of one model: norms, gated MLPs and rotary embeddings.

A module is recognised by what its forward computes on small random inputs, not by its class. It gets a forward of its
own, so other models in the process are not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from weft.conf.host.triton import is_interpreted, kernel_obstacle
from weft.engine.models.seeding import seeded

ROTARY = "apply_rotary_pos_emb"
"""Function of transformers' modelling code that rotates queries and keys."""
CLOSE = 1e-5
"""Largest difference of a recognised forward from the kernel's formula, in fp32, on values around 1."""


class Kernel(NamedTuple):
    """A fused kernel for a module.

    Attributes:
        forward: function of the module and its arguments that replaces the module's forward.
    """

    kind: str
    forward: Callable[..., Any]


def fuse(model: PreTrainedModel, device: torch.device) -> Counter[str]:
    """Give each module of ``model`` that a fused kernel computes the kernel's forward.

    Args:
        model: a model or a part of one, which is changed.

    Returns:
        The number of modules by kind of kernel.

    Raises:
        ValueError: the kernels do not run here.
    """
    if obstacle := kernel_obstacle(device.type != "cpu"):
        raise ValueError(f"model.kernels=fused: {obstacle}")
    if is_interpreted():
        from weft.engine.models.interpreter import complete_interpreter

        complete_interpreter()
    found = Counter[str]()
    for module in model.modules():
        if (kernel := kernel_for(module)) is not None:
            module.forward = MethodType(kernel.forward, module)
            found[kernel.kind] += 1
    return found


def require_kernels(model: PreTrainedModel) -> None:
    """Check that fused kernels compute at least one module of a model, which may be on the meta device.

    Raises:
        ValueError: they compute none.
    """
    if not kernel_kinds(model):
        raise ValueError(
            f"model.kernels=fused: {type(model).__name__} has no norm, rotary embedding or gated MLP that a fused "
            "kernel computes; set model.kernels=none"
        )


def kernel_kinds(model: PreTrainedModel) -> Counter[str]:
    """Return the number of modules that fused kernels compute, by kind. The model may be on the meta device."""
    return Counter(kernel.kind for module in model.modules() if (kernel := kernel_for(module)) is not None)


def kernel_for(module: nn.Module) -> Kernel | None:
    """Return the fused kernel that computes what ``module`` does, or None."""
    for kernel in (_layer_norm, _rms_norm, _gated_mlp, _rotary):
        if (found := kernel(module)) is not None:
            return found
    return None


def _layer_norm(module: nn.Module) -> Kernel | None:
    if type(module) is not nn.LayerNorm or module.bias is None or len(module.normalized_shape) != 1:
        return None

    def forward(self: nn.LayerNorm, x: Tensor) -> Tensor:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        if x.dtype != self.weight.dtype:
            return nn.LayerNorm.forward(self, x)
        return LigerLayerNormFunction.apply(x, self.weight, self.bias, self.eps)

    return Kernel("LayerNorm", forward)


def _rms_norm(module: nn.Module) -> Kernel | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, weight in module.named_parameters() if weight.dim() == 1]
    if not isinstance(eps, float) or names != ["weight"] or len(list(module.parameters())) != 1:
        return None
    formula = _rms_formula(module, eps)
    if formula is None:
        return None
    offset, casting = formula

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        if x.dtype != self.weight.dtype:
            return type(self).forward(self, x)
        return LigerRMSNormFunction.apply(x, self.weight, eps, offset, casting, False, None)

    return Kernel("RMSNorm", forward)


def _rms_formula(module: nn.Module, eps: float) -> tuple[float, str] | None:
    """Return the offset of the weight and where a norm rounds to bf16 ("llama": before the product), or None."""
    with seeded(0, "kernels"):
        x, weight = torch.randn(4, 16), torch.rand(16) + 0.5
    formulas = [(offset, casting) for offset in (0.0, 1.0) for casting in ("llama", "gemma")]
    small = _smaller(module, weight=nn.Parameter(weight))
    got = _tried(small, x)
    formulas = [each for each in formulas if got is not None and _close(got, _rms(x, weight, eps, *each))]
    half = x.bfloat16()
    small.weight = nn.Parameter(weight.bfloat16())
    got = _tried(small, half)
    narrow = small.weight.detach()
    if not formulas or got is None or got.dtype != half.dtype:
        return None
    return min(formulas, key=lambda each: float((_rms(half, narrow, eps, *each) - got).abs().sum()))


def _rms(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        return (offset + weight) * normed.to(x.dtype)
    return ((offset + weight.float()) * normed).to(x.dtype)


def _gated_mlp(module: nn.Module) -> Kernel | None:
    children = dict(module.named_children())
    packed = {"gate_up_proj", "down_proj"} <= children.keys()
    if not packed and not {"gate_proj", "up_proj", "down_proj"} <= children.keys():
        return None
    activation = _activation(module, packed)
    if activation is None:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if packed else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(gated_product(activation, gate, up))

    return Kernel({"silu": "SwiGLU", "gelu": "GeGLU"}[activation], forward)


def gated_product(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return ``activation(gate) * up`` by a fused kernel, for "silu" or "gelu", of which tensors are overwritten."""
    if activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def _activation(module: nn.Module, packed: bool) -> str | None:
    """Return the activation in ``down(activation(gate) * up)``, or None if the module computes something else."""
    with seeded(0, "kernels"):
        x, gate, up, down = torch.randn(2, 3, 4), nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)
        both = nn.Linear(4, 12)
    with torch.no_grad():
        both.weight.copy_(torch.cat([gate.weight, up.weight]))
        both.bias.copy_(torch.cat([gate.bias, up.bias]))
        got = _tried(_smaller(module, gate_proj=gate, up_proj=up, gate_up_proj=both, down_proj=down), x)
        for name, function in (("silu", F.silu), ("gelu", lambda value: F.gelu(value, approximate="tanh"))):
            if got is not None and _close(got, down(function(gate(x)) * up(x))):
                return name
    return None


def _rotary(module: nn.Module) -> Kernel | None:
    plain = type(module).forward
    if not isinstance(plain, FunctionType) or ROTARY not in plain.__code__.co_names:
        return None
    function = plain.__globals__.get(ROTARY)
    if not callable(function) or not _rotates_halves(function):
        return None
    names = plain.__globals__ | {ROTARY: fused_rotation(function)}
    forward = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    forward.__kwdefaults__ = plain.__kwdefaults__
    return Kernel("rotary", forward)


@cache
def fused_rotation(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that rotates queries and keys by a fused kernel, or by ``plain`` where the kernel cannot."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [B, heads, S, D] in place. No operation before the rotation has saved them."""
        from liger_kernel.ops.rope import LigerRopeFunction

        usual = not more and named in ({}, {"unsqueeze_dim": 1})
        if not usual or cos.dim() != 3 or cos.shape[-1] != q.shape[-1] or not q.dtype == k.dtype == cos.dtype:
            return plain(q, k, cos, sin, *more, **named)
        return LigerRopeFunction.apply(q, k, cos, sin)

    return rotate


@cache
def _rotates_halves(function: Callable[..., Any]) -> bool:
    """Return True if a function rotates the halves of each head, with cosines and sines [B, S, D]."""
    with seeded(0, "kernels"):
        q, k, angles = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4).repeat(1, 1, 2)
    got = _tried(function, q, k, angles.cos(), angles.sin())
    if not isinstance(got, tuple) or len(got) != 2:
        return False
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    wanted = (x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin for x in (q, k))
    return all(_close(one, other) for one, other in zip(got, wanted, strict=True))


def _smaller(module: nn.Module, **parts: Any) -> Any:
    """Return a module with the class and attributes of ``module``, but with small ``parts`` for its own.

    Parts that ``module`` lacks are left out. Others, such as activation functions, are shared.
    """
    small: Any = object.__new__(type(module))
    nn.Module.__init__(small)
    small.__dict__.update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    small.__dict__.pop("forward", None)
    own = {**module._parameters, **module._modules}
    for name in own:
        setattr(small, name, parts.get(name, own[name]))
    return small


def _tried(function: Callable[..., Any], *arguments: Tensor) -> Any:
    try:
        with torch.no_grad():
            return function(*arguments)
    except Exception:  # any: it is Hugging Face's or the model's own code, and not what was looked for
        return None


def _close(got: Any, wanted: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == wanted.shape and float((got - wanted).abs().max()) < CLOSE
