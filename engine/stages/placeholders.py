"""Placeholders: what stands in a stage's model where other stages have their modules."""

from __future__ import annotations

from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn


class Port:
    """Where a stage's model takes in the hidden state that another stage has made."""

    def __init__(self) -> None:
        self.hidden: Tensor | None = None
        """[B, S, H], while a forward is under way."""


class Leave(Exception):
    """Ends a forward after the stage's last layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Placeholder(nn.Module):
    """Has the plain attributes of the module that it stands for, such as a layer's attention type."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and (value is None or isinstance(value, bool | int | float | str | Enum)):
                setattr(self, name, value)


class _Layer(Placeholder):
    """A decoder layer of another stage; answers in the form that the real one would."""

    def __init__(self, original: nn.Module, answer_length: int | None) -> None:
        super().__init__(original)
        self._answer_length = answer_length

    def _answer(self, hidden: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        if self._answer_length is None:
            return hidden
        return (hidden, *[None] * (self._answer_length - 1))


class SkippedLayer(_Layer):
    """Hands on what it gets, at no cost."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """The first tensor among the arguments: the hidden state."""
        return self._answer(first_tensor(args, kwargs))


class EntryLayer(_Layer):
    """The layer before a stage's own: answers with the hidden state in the port."""

    def __init__(self, original: nn.Module, answer_length: int | None, port: Port) -> None:
        super().__init__(original, answer_length)
        self._port = port

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """The hidden state [B, S, H] from the stage before."""
        assert self._port.hidden is not None
        return self._answer(self._port.hidden)


class ExitLayer(Placeholder):
    """The layer after a stage's own: ends the forward with the hidden state that it gets."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `Leave`."""
        raise Leave(first_tensor(args, kwargs))


class Upstream(Placeholder):
    """An embedding, or another module that runs before the layers, in a stage that does not need it.

    Its answer only has the right shape, type and device, so that Hugging Face's code can
    make masks and rotary tables from them.
    """

    def __init__(self, original: nn.Module, port: Port) -> None:
        super().__init__(original)
        self._width = getattr(original, "embedding_dim", getattr(original, "out_features", None))
        self._port = port

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros: [..., width] for token or position ids, [..., width] for [..., any] features."""
        if not any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
            raise ValueError("a module before the layers makes something of no tensor, which every stage would need")
        given, hidden = first_tensor(args, kwargs), self._port.hidden
        assert hidden is not None
        if given.is_floating_point() and given.dim() > 2:
            shape = (*given.shape[:-1], self._width or given.shape[-1])
        else:
            shape = (*given.shape, self._width or hidden.shape[-1])
        return torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)

    def __getattr__(self, name: str) -> Any:
        """For code that asks an embedding's weight for its type or device."""
        if name == "weight" and "weight" not in self._parameters and self._port.hidden is not None:
            return self._port.hidden
        return super().__getattr__(name)


class Downstream(Placeholder):
    """The final norm or the head, in a stage that ends before it."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Never reached."""
        raise AssertionError("a stage ran past its own layers")


def hollow(module: nn.Module, keep: set[str], shell: Placeholder) -> Placeholder:
    """Give ``shell`` the parameters of ``module`` that ``keep`` names, and nothing else."""
    for name, parameter in module.named_parameters(recurse=False):
        if name in keep:
            shell.register_parameter(name, parameter)
    for name, child in module.named_children():
        inner = {path.removeprefix(f"{name}.") for path in keep if path.startswith(f"{name}.")}
        if inner:
            shell.add_module(name, hollow(child, inner, Placeholder(child)))
    return shell


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor among a call's arguments."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
