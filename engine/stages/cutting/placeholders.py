"""Placeholders in a stage's model for modules of other stages."""

from __future__ import annotations

from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from weft.engine.models.skeleton import Placeholder
from weft.engine.stages.cutting.port import Port

PLAIN = (Tensor, int, float, str, torch.dtype, torch.device, type(None))
"""Types of arguments for which the shapes of a call's result are stored, because a trace costs host time."""

MOST_KNOWN = 1024
"""Results that are stored, because each length of a sequence has its own."""


class SkippedLayer(Placeholder):
    """A decoder layer of another stage, which returns its input hidden state in the layer's output format."""

    def __init__(self, original: nn.Module, answer_length: int | None) -> None:
        super().__init__(original)
        self._answer_length = answer_length

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return the first tensor among the arguments, which is the hidden state."""
        return self._answer(first_tensor(args, kwargs))

    def _answer(self, hidden: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        if self._answer_length is None:
            return hidden
        return (hidden, *[None] * (self._answer_length - 1))


class EntryLayer(SkippedLayer):
    """The layer before a stage's own layers, which returns the received hidden state."""

    def __init__(self, original: nn.Module, answer_length: int | None, port: Port) -> None:
        super().__init__(original, answer_length)
        self._port = port

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return the hidden state from the previous stage."""
        assert self._port.hidden is not None
        return self._answer(self._port.hidden)


class ExitLayer(SkippedLayer):
    """A layer after a stage's own layers. It records boundary tensors, and ends the forward when all are recorded."""

    def __init__(self, original: nn.Module, answer_length: int | None, port: Port, index: int) -> None:
        super().__init__(original, answer_length)
        self._port, self._index = port, index

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Return the hidden state for the next layer. Raise StageEnded if all boundary tensors are recorded."""
        hidden = first_tensor(args, kwargs)
        self._port.take_out(self._index, hidden, args, kwargs)
        return self._answer(hidden)


class Upstream(Placeholder):
    """An embedding, or another module that runs before the layers, in a stage that does not need its values.

    Its output has the right shape, type and device, but no values. Hugging Face's code derives masks and rotary tables
    from these.
    """

    def __init__(self, original: nn.Module, port: Port) -> None:
        super().__init__(original)
        self._port = port
        self._known: dict[Any, Any] = {}
        """Results of calls on the meta device, by shapes, types and other arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return zeros with the shapes of the real output."""
        return self._answer(self._likeness[0], *args, **kwargs)

    def _answer(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Return zeros with the shapes of the result of ``function``, traced on the meta device."""
        hidden = self._port.hidden
        assert hidden is not None
        leaves, form = tree_flatten((args, kwargs))
        values = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        key = function, form, *values  # with types, because 1, 1.0 and True are equal
        if not all(isinstance(leaf, PLAIN) for leaf in leaves):
            answer = self._traced(function, args, kwargs)
        elif (answer := self._known.get(key, self)) is self:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            answer = self._known[key] = self._traced(function, args, kwargs)
        return tree_map_only(Tensor, lambda tensor: self._zero(tensor, hidden).expand(tensor.shape).clone(), answer)

    @staticmethod
    def _traced(function: Any, args: Any, kwargs: Any) -> Any:
        with torch.no_grad(), torch.device("meta"):
            args, kwargs = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), (args, kwargs))
            return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module: zeros without memory for a weight, a traced call for a method."""
        found = super().__getattr__(name)
        if isinstance(found, MethodType):
            return partial(self._answer, found)
        if isinstance(found, Tensor) and found.is_meta and (hidden := self._port.hidden) is not None:
            return self._zero(found, hidden).expand(found.shape)
        return found

    def _zero(self, like: Tensor, hidden: Tensor) -> Tensor:
        dtype = self._port.dtype if like.is_floating_point() else like.dtype
        return torch.zeros((), dtype=dtype, device=hidden.device)


class Downstream(Placeholder):
    """The final norm or the head, in a stage that ends before it.

    It is called if none of the layers after the stage's own layers runs.
    """

    def __init__(self, original: nn.Module, port: Port | None = None) -> None:
        super().__init__(original)
        self._port = port

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End the forward by raising `StageEnded` with the boundary tensors."""
        assert self._port is not None
        self._port.take_out(self._port.num_layers, first_tensor(args, kwargs), args, kwargs)
        raise AssertionError("a stage ran past its own layers")


def move_kept(module: nn.Module, keep: set[str], shell: Placeholder) -> Placeholder:
    """Move the parameters of ``module`` that ``keep`` names to ``shell``, and return ``shell``."""
    for name, parameter in module.named_parameters(recurse=False):
        if name in keep:
            shell._parameters[name] = parameter
    for name, child in module.named_children():
        inner = {path.removeprefix(f"{name}.") for path in keep if path.startswith(f"{name}.")}
        if inner:
            shell._modules[name] = move_kept(child, inner, Placeholder(child))
    return shell


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first tensor among a call's arguments."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
