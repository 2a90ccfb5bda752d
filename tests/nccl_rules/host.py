"""Rules for the host's use of tensors: which are in its memory, and what makes it wait for the device."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from tests.nccl_rules.device import Device

_MARK = "_in_host_memory"
FACTORIES = {
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer),
    *(torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace, torch.eye),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
}
"""Functions that make a tensor in host memory unless a device is given."""
WAITS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.nonzero, Tensor.unique),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__),
    *(torch.nonzero, torch.equal, torch.allclose, torch.masked_select, torch.unique, torch.argwhere),
}
"""Functions that return a value to the host, which waits for it."""
MOVES = {Tensor.to, Tensor.cuda}


def is_on_host(tensor: Tensor) -> bool:
    """True if the tensor was made in host memory and never moved to the device."""
    return getattr(tensor, _MARK, False)


class HostRules(TorchFunctionMode):
    """Distinguish host tensors from device tensors, which on CPUs are the same, and block the host where a GPU would.

    A tensor is on the host if a factory made it without a device argument, or if all its inputs are.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run ``func`` under the rules."""
        kwargs = kwargs or {}
        if func in FACTORIES:
            result = func(*args, **kwargs)
            if (kwargs.get("device") is None or _optimizer_calls()) and not any(
                not is_on_host(t) for t in _tensors(args)
            ):
                setattr(result, _MARK, True)
            return result
        given = list(_tensors((*args, *kwargs.values())))
        from_host = bool(given) and all(is_on_host(tensor) for tensor in given)
        if func in WAITS and not from_host:
            self._device.synchronise(getattr(func, "__name__", str(func)).strip("_"))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            if func in MOVES and _names_device(args, kwargs):
                setattr(result, _MARK, False)
            elif func is Tensor.cpu or (from_host and func not in MOVES):
                if not from_host and any(result is tensor for tensor in given):
                    result = result.view_as(result)  # the one on the device stays there
                setattr(result, _MARK, True)
        return result


def _optimizer_calls() -> bool:
    """Torch's optimisers keep their step counts in host memory, and say so by a name that here is the device's too."""
    return "/torch/optim/" in sys._getframe(2).f_code.co_filename


def _names_device(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(value, torch.device | str) for value in (*args[1:], kwargs.get("device")))


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
