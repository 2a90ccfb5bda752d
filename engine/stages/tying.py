"""Tied weights: a weight that two stages of one rank hold is one parameter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from weft.engine.stages.stage import Stage


def share_tied(stages: Sequence[Stage]) -> None:
    """Replace tied weights of ``stages`` by the parameter of the first stage that holds them."""
    owned: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_global_parameters()):
            if name in stage.tied and owned.setdefault(name, parameter) is not parameter:
                replace_parameter(stage, parameter, owned[name])


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace ``old`` by ``new`` throughout ``module``."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, name, new)
