"""Lazy logits: a model's own forward runs, and its head is computed together with the loss, or whole on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from weft.engine.backward.products import multiply
from weft.engine.models.head_loss import HeadLoss, Step
from weft.engine.parallel.axis import AxisGroup
from weft.engine.parallel.vocabulary import VocabularyLoss

_log = logging.getLogger(__name__)
_COMPLETE = "_weft_complete"


def set_complete(block: nn.Module, complete: Callable[[], AbstractContextManager[None]]) -> None:
    """Set the context in which a block's weights are complete outside of its own forward and backward."""
    setattr(block, _COMPLETE, complete)


def whole_logits_reason(model: PreTrainedModel) -> str:
    """Return the reason for which a model's loss needs whole logits, or an empty string if chunks are possible."""
    head = linear_head(model)
    if head is None:
        return f"its head is {type(model.get_output_embeddings()).__name__}, not nn.Linear"
    if model.loss_function is not ForCausalLMLoss and not isinstance(model.loss_function, VocabularyLoss):
        return "its loss is not the usual causal one"
    return ""


def linear_head(model: PreTrainedModel) -> nn.Linear | None:
    """Return the linear layer that computes a model's logits, or None if something else does."""
    head = model.get_output_embeddings()
    if isinstance(head, ModulesToSaveWrapper):
        head = head.modules_to_save[head.active_adapters[0]]
    return head if type(head) is nn.Linear and "forward" not in vars(head) else None


class LazyHead:
    """The head of a model, whose logits are computed lazily within `deferred`."""

    def __init__(self, model: PreTrainedModel, group: AxisGroup, chunk_bytes: float) -> None:
        """Find the head. The model must have no `whole_logits_reason`.

        Args:
            group: ranks that share the vocabulary.
        """
        linear = linear_head(model)
        assert linear is not None
        self.name, self.group, self.chunk_bytes = type(model).__name__, group, chunk_bytes
        self.module, self.linear = model.get_output_embeddings(), linear
        path = next(name for name, module in model.named_modules() if module is self.module)
        self._parent, self._place = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        self._is_used = True

    def wants(self, tokens: int) -> bool:
        """True if a micro-batch of ``tokens`` tokens has more logits than a chunk."""
        whole = tokens * len(self.linear.weight) * torch.float32.itemsize
        return whole > self.chunk_bytes and not torch.is_autocast_enabled(self.linear.weight.device.type)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which the model's forward gets `LazyLogits`, instead of the head's result.

        Raises:
            RuntimeError: the forward has used the logits by other means than torch's functions.
        """
        self._parent._modules[self._place] = _Deferred(self)
        try:
            yield
        finally:
            self._parent._modules[self._place] = self.module
        if not self._is_used:
            raise RuntimeError(
                f"model.chunked_loss: {self.name} does not compute its loss by torch's functions; set it to never"
            )

    def logits(self, hidden: Tensor) -> LazyLogits:
        """Return the logits of hidden states [B, S, ..., H], lazily."""
        self._is_used = False
        shape = [*hidden.shape[:-1], len(self.linear.weight)]
        shape[1] *= self.group.size  # whose members have slices of the sequence
        return LazyLogits(self, hidden, torch.Size(shape), hidden.dtype)

    def whole(self, hidden: Tensor, what: str) -> Tensor:
        """Return the head's result, because the model's forward calls ``what`` with it."""
        self._is_used = True
        _log.info("%s: logits are computed whole, because the model's forward calls %s", self.name, what)
        return self.module(hidden)

    def chunks(self, hidden: Tensor) -> Iterator[Tensor]:
        """Yield the head's result in chunks of tokens."""
        self._is_used = True
        tokens = max(1, int(self.chunk_bytes // (torch.float32.itemsize * len(self.linear.weight))))
        yield from map(self.module, hidden.flatten(0, -2).split(tokens))

    def losses(self, hidden: Tensor, steps: tuple[Step, ...], labels: Tensor, ignore_index: int) -> Tensor:
        """Return the loss of each token, [tokens], within the head's own call, whose hooks gather weight and input."""
        self._is_used = True
        product = HeadLoss(
            weight=self.linear.weight,
            bias=self.linear.bias,
            labels=labels,
            ignore_index=ignore_index,
            steps=steps,
            chunk_bytes=self.chunk_bytes,
            group=self.group,
            differentiable=torch.is_grad_enabled(),
            complete=getattr(self.module, _COMPLETE, nullcontext),
        )
        self.linear.forward = partial(multiply, product=product)
        try:
            return self.module(hidden)
        finally:
            del self.linear.forward


class _Deferred(nn.Module):
    """Substitute for a head within `LazyHead.deferred`. It has the head's attributes."""

    def __init__(self, head: LazyHead) -> None:
        super().__init__()
        object.__setattr__(self, "_head", head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head.module, name)

    def forward(self, hidden: Tensor) -> LazyLogits:
        return self._head.logits(hidden)


class LazyLogits(Tensor):
    """Logits without values. Elementwise functions are recorded, and cross-entropy is computed in chunks.

    Any other torch function gets the whole logits. These are computed then.
    """

    _head: LazyHead
    _hidden: Tensor
    _steps: tuple[Step, ...]

    @staticmethod
    def __new__(
        cls, head: LazyHead, hidden: Tensor, shape: torch.Size, dtype: torch.dtype, steps: tuple[Step, ...] = ()
    ) -> LazyLogits:
        """Return the head's logits of ``hidden`` after ``steps``, with the shape [..., V]."""
        made: LazyLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made._head, made._hidden, made._steps = head, hidden, steps
        return made

    def token_losses(self, labels: Tensor, ignore_index: int) -> Tensor:
        """Return the cross-entropy of each token, [tokens] in fp32, for labels [tokens] of the whole vocabulary."""
        steps = self._steps
        if steps and steps[-1] == _Convert(torch.float32):  # a loss is computed in fp32 in any case
            steps = steps[:-1]
        return self._head.losses(self._hidden, steps, labels, ignore_index)

    def chunks(self) -> Iterator[Tensor]:
        """Yield the logits in chunks [tokens, V], in the order of the tokens, for computations without gradients."""
        for chunk in self._head.chunks(self._hidden):
            for step in self._steps:
                chunk = step(chunk)
            yield chunk

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RECORDED and isinstance(args[0], LazyLogits):
            answer = _RECORDED[func](args[0], *args[1:], **kwargs)
            if answer is not NotImplemented:
                return answer
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIPTIONS:
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        args, kwargs = torch.utils._pytree.tree_map_only(LazyLogits, lambda lazy: lazy._whole(name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        raise NotImplementedError(f"{func}: logits of a loss in chunks have no values; set model.chunked_loss=never")

    def _whole(self, what: str) -> Tensor:
        whole = self._head.whole(self._hidden, what)
        for step in self._steps:
            whole = step(whole)
        return whole.reshape(self.shape)

    def _then(self, step: Step, dtype: torch.dtype | None = None) -> LazyLogits:
        return LazyLogits(self._head, self._hidden, self.shape, dtype or self.dtype, (*self._steps, step))


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def scaled(lazy: LazyLogits, by: Any) -> Any:
        return lazy._then(lambda logits: function(logits, by)) if isinstance(by, int | float) else NotImplemented

    return scaled


def _tanh(lazy: LazyLogits) -> LazyLogits:
    return lazy._then(torch.tanh)


@dataclass(frozen=True)
class _Convert:
    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


def _converted(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.dtype):
        return NotImplemented
    return lazy if args[0] is lazy.dtype else lazy._then(_Convert(args[0]), args[0])


def _viewed(lazy: LazyLogits, *shape: Any) -> Any:
    size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    rows, words = lazy.shape[:-1].numel(), lazy.shape[-1]
    return _flat(lazy) if tuple(size) in ((-1, words), (rows, words)) else NotImplemented


def _flattened(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    return _flat(lazy) if (start_dim, end_dim) == (0, -2) else NotImplemented


def _flat(lazy: LazyLogits) -> LazyLogits:
    shape = torch.Size((lazy.shape[:-1].numel(), lazy.shape[-1]))
    return LazyLogits(lazy._head, lazy._hidden, shape, lazy.dtype, lazy._steps)


def _cross_entropy(
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is size_average is reduce is None and not label_smoothing and lazy._head.group.size == 1
    if not plain or lazy.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    losses = lazy.token_losses(target, ignore_index)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


_RECORDED: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    dict.fromkeys((Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, torch.mul), _scaled(torch.mul))
    | dict.fromkeys((Tensor.div, Tensor.__truediv__, Tensor.__itruediv__, torch.div), _scaled(torch.div))
    | dict.fromkeys((torch.tanh, Tensor.tanh), _tanh)
    | dict.fromkeys((Tensor.view, Tensor.reshape), _viewed)
    | {
        Tensor.float: lambda lazy: _converted(lazy, torch.float32),
        Tensor.to: _converted,
        Tensor.contiguous: lambda lazy: lazy,
        Tensor.flatten: _flattened,
        F.cross_entropy: _cross_entropy,
    }
)
"""Functions that do not need the logits' values, or only chunks of them."""
_PROPERTIES = ("shape", "dtype", "device", "ndim", "is_meta", "requires_grad", "grad_fn")
_DESCRIPTIONS = frozenset(getattr(Tensor, name).__get__ for name in _PROPERTIES) | {
    Tensor.size,
    Tensor.dim,
    Tensor.is_floating_point,
    Tensor.numel,
}
