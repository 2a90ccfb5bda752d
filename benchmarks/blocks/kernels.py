"""Single kernels of a Llama's block and its loss: torch's, compiled ones, Liger's and Weft's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from deepspeed.runtime.chunked_cross_entropy import chunked_cross_entropy
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.blocks.clock import Passes
from benchmarks.blocks.llama import COMPILED, DTYPE, FUSED, Shape, Variant
from weft.conf.host.triton import is_interpreted
from weft.conf.schema import ModelConfig
from weft.engine.backward.products import multiply
from weft.engine.models.head_loss import HeadLoss
from weft.engine.models.kernels import fused_rotation, gated_product, kernel_for
from weft.engine.parallel.axis import Alone
from weft.engine.zero.kernels.accumulation import accumulate_plain
from weft.engine.zero.norm import squared_norm

Function = Callable[..., Any]
"""Maps tensors to a tensor or to several."""


class Candidate(NamedTuple):
    """An implementation of a kernel.

    Attributes:
        kernel, name: the kernel, and whose implementation it is.
        needs: what of a machine it needs, as a variant of a block.
        inputs: functions that make its inputs. It is differentiable in all.
    """

    kernel: str
    name: str
    needs: Variant
    function: Function
    inputs: tuple[Callable[[], Tensor], ...]

    @contextmanager
    def passes(self) -> Iterator[Passes]:
        """Context with its passes, with the same inputs and gradients for all implementations."""
        torch.manual_seed(0)
        inputs = [make() for make in self.inputs]
        gradients: list[Tensor] = []

        def prepare() -> list[Tensor]:
            return [tensor.clone().requires_grad_() for tensor in inputs]  # some kernels compute in place

        def forward(leaves: list[Tensor]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
            outputs = self.function(*leaves)
            return leaves, outputs if isinstance(outputs, tuple) else (outputs,)

        def backward(passed: tuple[list[Tensor], tuple[Tensor, ...]]) -> dict[str, Tensor]:
            leaves, outputs = passed
            if not gradients:
                gradients.extend(_gradient(output) for output in outputs)
            torch.autograd.backward(outputs, gradients)
            results = enumerate((*outputs, *(leaf.grad for leaf in leaves)))
            return {str(number): tensor for number, tensor in results if tensor is not None}

        yield Passes(prepare, forward, backward)
        torch.compiler.reset()


class Accumulation(NamedTuple):
    """An implementation of the accumulation of a received gradient, bf16, into a shard. It has no backward."""

    name: str
    needs: Variant
    accumulate: Callable[[Tensor, Tensor], Tensor]
    elements: int
    device: torch.device
    kernel: str = "accumulation, norm"

    @contextmanager
    def passes(self) -> Iterator[Passes]:
        """Context with its passes."""
        torch.manual_seed(0)
        shard = torch.randn(self.elements, device=self.device)
        received = torch.randn(self.elements, device=self.device).bfloat16()

        def forward(into: Tensor) -> dict[str, Tensor]:
            square = self.accumulate(into, received)
            return {"shard": into, "square": square}

        yield Passes(shard.clone, forward, lambda results: results)


def _accumulations(shape: Shape, device: torch.device) -> Iterator[Accumulation]:
    """Yield the implementations of accumulation, for as many elements as an MLP of the block has."""

    def plain(shard: Tensor, received: Tensor) -> Tensor:
        accumulate_plain(shard, received, adds=True)
        return squared_norm([shard], device)

    def fused(shard: Tensor, received: Tensor) -> Tensor:
        from weft.engine.zero.kernels.accumulation_triton import accumulate_fused

        return accumulate_fused(shard, received, adds=True).double().sum()

    count = 3 * shape.width * shape.inner
    yield Accumulation("torch", Variant(), plain, count, device)
    yield Accumulation("Weft", FUSED, fused, count, device)


def _gradient(output: Tensor) -> Tensor:
    """Return the gradient of a loss, or random numbers that repeat."""
    ramp = torch.arange(output.numel(), device=output.device, dtype=torch.float32).sin()
    return torch.ones_like(output) if output.dim() == 0 else ramp.view(output.shape).to(output.dtype)


def candidates(shape: Shape, tokens: int, device: torch.device) -> Iterator[Candidate | Accumulation]:
    """Yield the implementations of each kernel for one sequence; the first one of each is torch's."""

    if is_interpreted():
        from weft.engine.models.interpreter import complete_interpreter

        complete_interpreter()

    def normal(*size: int) -> Callable[[], Tensor]:
        return lambda: torch.randn(*size, device=device, dtype=DTYPE)

    def heads(count: int) -> Callable[[], Tensor]:
        # As the block has them: the projection's output, transposed.
        return lambda: normal(1, tokens, count, shape.width // shape.heads)().transpose(1, 2)

    angles = torch.outer(torch.arange(tokens), torch.arange(1, shape.width // shape.heads // 2 + 1) ** -1.0)
    angles = angles.repeat(1, 2)[None].to(device)
    turns = {"cos": angles.cos().to(DTYPE), "sin": angles.sin().to(DTYPE)}
    norm = LlamaRMSNorm(shape.width).to(device, DTYPE).requires_grad_(False)
    own_norm = kernel_for(norm)
    assert own_norm is not None
    products = (normal(tokens, shape.inner),) * 2
    plain: dict[str, tuple[Function, Function, tuple[Callable[[], Tensor], ...]]] = {
        "RMSNorm": (norm.forward, MethodType(own_norm.forward, norm), (normal(1, tokens, shape.width),)),
        "rotary": (
            partial(apply_rotary_pos_emb, **turns),
            partial(fused_rotation(apply_rotary_pos_emb), **turns),
            (heads(shape.heads), heads(shape.groups)),
        ),
        "SwiGLU": (lambda gate, up: F.silu(gate) * up, partial(gated_product, "silu"), products),
    }
    for kernel, (eager, liger, inputs) in plain.items():
        yield Candidate(kernel, "torch", Variant(), eager, inputs)
        yield Candidate(kernel, "torch.compile", COMPILED, torch.compile(eager, dynamic=False), inputs)
        yield Candidate(kernel, "Liger", FUSED, liger, inputs)
    yield from _accumulations(shape, device)
    yield from losses(shape, tokens, device)


def losses(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype = DTYPE) -> Iterator[Candidate]:
    """Yield the implementations of a head with its loss, of which the first is torch's."""
    labels = torch.randint(shape.words, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, shape.width, device=device, dtype=dtype)

    ends = partial(normal, tokens), lambda: normal(shape.words) * shape.width**-0.5
    for name, needs, function in (
        ("torch", Variant(), _whole_loss),
        ("torch.compile", COMPILED, torch.compile(_whole_loss, dynamic=False)),
        ("Weft", Variant(), _weft_loss),
        ("DeepSpeed chunked_cross_entropy", Variant(), _deepspeed_loss),
        *((("torch linear_cross_entropy", Variant(), _torch_loss),) if hasattr(F, "linear_cross_entropy") else ()),
        ("Liger", FUSED, _liger_loss),
    ):
        yield Candidate("cross-entropy", name, needs, partial(function, labels=labels), ends)


def _whole_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def _weft_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    product = HeadLoss(
        weight=weight,
        bias=None,
        labels=labels,
        ignore_index=-100,
        steps=(),
        chunk_bytes=ModelConfig.loss_chunk_mb * 1e6,
        group=Alone("tensor"),
        differentiable=True,
        complete=nullcontext,
    )
    return multiply(hidden, product).sum()


def _deepspeed_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return chunked_cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


def _torch_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    # torch 2.13 has both, and 2.11 neither.
    compute, options = getattr(F, "linear_cross_entropy"), getattr(torch.nn, "LinearCrossEntropyOptions")  # noqa: B009
    loss: Tensor = compute(hidden, weight, labels, reduction="sum", options=options())
    return loss


def _liger_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum")
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss
