"""The matrices of a model that Muon orthogonalizes, each of which one replica owns whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from torch import nn


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a matrix that belongs to neither an embedding nor the head, by DeepSpeed's rule.

    Args:
        name: the parameter's name in the whole model.
    """
    return parameter.ndim >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def tag(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set ``use_muon`` of each parameter, by its name in the whole model. See `is_hidden_matrix`."""
    for name, parameter in named:
        parameter.use_muon = is_hidden_matrix(name, parameter)


def is_owned(parameter: nn.Parameter) -> bool:
    """Return True if one replica steps the whole parameter."""
    return parameter.requires_grad and getattr(parameter, "use_muon", False)


def place(matrices: Sequence[Sequence[int]], loads: list[float]) -> list[int]:
    """Return the replica that owns each matrix, and add its work to ``loads``.

    Shards have equal lengths, so matrices are first divided into shares of about equal sizes, largest matrix first.
    Then the share with the most work goes to the replica that has the least so far.

    Args:
        matrices: their shapes.
        loads: work of each replica, in the other buckets of its rank.
    """
    shares: list[list[int]] = [[] for _ in loads]
    sizes, works = [0] * len(loads), [0.0] * len(loads)
    for number in sorted(range(len(matrices)), key=lambda number: -prod(matrices[number])):
        least = min(range(len(loads)), key=lambda share: (sizes[share], works[share]))
        shares[least].append(number)
        sizes[least] += prod(matrices[number])
        works[least] += newton_schulz_work(matrices[number])
    free = sorted(range(len(loads)), key=loads.__getitem__)
    owners = [0] * len(matrices)
    for share in sorted(range(len(loads)), key=lambda share: -works[share]):
        owner = free.pop(0)
        loads[owner] += works[share]
        for number in shares[share]:
            owners[number] = owner
    return owners


def longest_share(matrices: Sequence[Sequence[int]], replicas: int) -> int:
    """Return the number of elements that the replica with the most of them owns. See `place`."""
    owned = [0] * replicas
    for shape, owner in zip(matrices, place(matrices, [0.0] * replicas), strict=True):
        owned[owner] += prod(shape)
    return max(owned)


def newton_schulz_work(shape: Sequence[int]) -> float:
    """Return a number that is proportional to the work of Newton-Schulz iterations on a matrix, or a stack of them."""
    return float(prod(shape) * min(shape[-2:]))
