"""The origin of the tensors that decoder layers take: the layer that made them, or the modules before all layers.

A stage must send every tensor that it has made and that a later layer takes. This includes the hidden state, and in
some models keys and values that later layers share, a router's state, or embeddings for every layer. Tensors that do
not depend on weights, such as masks and rotary tables, are made by each stage itself.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

BEFORE = -1
"""Stands for the time before the first layer, and for the modules that run then."""
MAPPINGS = (dict, UserDict)
"""Types of arguments that layers modify in place, such as a table of shared keys and values."""
VALUELESS = ("zeros", "ones", "full", "empty", "rand", "randn")
"""Operations that use a tensor's shape, but not its values, such as ``zeros_like`` and ``new_full``."""

Entry = tuple[str | int, ...]
"""Identifies an argument of a layer: its position or name, followed by keys if the argument is a mapping."""
Tree = Any
"""An argument: nested tuples and lists, with tensors or other objects as leaves."""


@dataclass(frozen=True)
class Taken:
    """A tensor that a layer takes as input, and its origin."""

    layer: int
    entry: Entry
    place: tuple[int, ...]
    """Indices in the entry, if the entry is a tuple or a list."""
    maker: int
    """The layer that made it, or `BEFORE`."""
    tensor: Tensor


class Provenance(TorchDispatchMode):
    """Dispatch mode that tracks tensors that depend on weights while a model runs.

    Tensors are identified by their memory, so that views and in-place writes count.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.taken: list[Taken] = []
        """The tensors that layers have taken, in order."""
        self.uses: dict[int, set[int]] = {}
        """Times of use of each weight, by its memory.

        The time is the number of starts and ends of layers so far, or `BEFORE` before the first.
        """
        self._layers = layers
        self._now = BEFORE
        self._time = BEFORE
        self._inside = False
        self._makers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # kept alive, so that no address is reused
        self._weights = {memory(parameter) for parameter in model.parameters()}

    @contextmanager
    def watching(self) -> Iterator[Provenance]:
        """Track the operations that run in this context."""
        with ExitStack() as stack, torch.no_grad(), self:
            for index, layer in enumerate(self._layers):
                hook = layer.register_forward_pre_hook(self._enter(index), with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
                stack.callback(layer.register_forward_hook(self._leave).remove)
            yield self

    def _enter(self, index: int) -> Any:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._now, self._time, self._inside = index, self._time + 1, True
            for entry, tree in entries(args, kwargs):
                for place, tensor in leaves(tree):
                    maker = self._makers.get(memory(tensor))
                    if maker is not None:
                        self.taken.append(Taken(index, entry, place, maker, tensor))

        return enter

    @property
    def after(self) -> int:
        """Time of use, as in `uses`, after the last layer that has run."""
        return self._time

    def _leave(self, *_: Any) -> None:
        self._time, self._inside = self._time + 1, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record the origin of its results and its uses of weights."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.removeprefix("new_").removesuffix("_like").split(".")[0] in VALUELESS:
            return result
        given = [tensor for _, tensor in leaves((*args, *kwargs.values()))]
        makers = [self._makers[memory(tensor)] for tensor in given if memory(tensor) in self._makers]
        for tensor in given:
            if memory(tensor) in self._weights:
                self.uses.setdefault(memory(tensor), set()).add(self._time)
                makers.append(self._now)
        if makers:
            shared = {memory(tensor) for tensor in given}
            for _, tensor in leaves(result):
                if memory(tensor) not in self._weights:
                    new = self._inside and memory(tensor) not in shared  # neither a view nor modified in place
                    self._makers[memory(tensor)] = max(*makers, self._now) if new else max(makers)
                    self._alive.append(tensor)
        return result


def memory(tensor: Tensor) -> int:
    """Return a key that is equal for views of the same memory, on any device."""
    return tensor.untyped_storage()._cdata


def entries(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Entry, Tree]]:
    """Yield the arguments of a call, with mappings split by key."""

    def opened(entry: Entry, tree: Tree) -> Iterator[tuple[Entry, Tree]]:
        if isinstance(tree, MAPPINGS):
            for key, value in tree.items():
                yield from opened((*entry, key), value)
        else:
            yield entry, tree

    for number, value in enumerate(args):
        yield from opened((number,), value)
    for name, value in kwargs.items():
        yield from opened((name,), value)


def leaves(tree: Tree) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the tensors of nested tuples and lists, with their indices."""
    if isinstance(tree, Tensor):
        yield (), tree
    elif isinstance(tree, tuple | list):
        for index, part in enumerate(tree):
            for place, tensor in leaves(part):
                yield (index, *place), tensor
