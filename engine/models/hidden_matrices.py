"""The matrices of a model that Muon orthogonalizes."""

from __future__ import annotations

from torch import nn


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True if a parameter is a matrix that belongs to neither an embedding nor the head, by DeepSpeed's rule.

    Args:
        name: the parameter's name in the whole model.
    """
    return parameter.ndim >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
