"""The parts of a model that the ranks of axis groups store."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from weft.engine.models.skeleton import decoder_layers
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut, set_held
from weft.engine.parallel.experts import dispatch_over, expert_cuts, hold_parts
from weft.engine.parallel.tensor import share_layers
from weft.engine.parallel.tensor_styles import TensorPlan
from weft.engine.stages.cutting.stage import Stage


def take_part(model: PreTrainedModel, axes: AxisGroups) -> dict[str, Cut]:
    """Reduce a model to this rank's part of it, in place.

    Returns:
        This rank's parts of divided parameters, by name.

    Raises:
        ValueError: these groups cannot divide the model.
    """
    cuts = expert_cuts(model, axes.expert)
    hold_parts(model, cuts)
    if axes.tensor.size == 1:
        dispatch_over(axes, model)
        return cuts
    plan = TensorPlan(model)
    styles = [style for name in cuts if (style := plan.style(name)) is not None]
    for name, cut in cuts.items():  # experts are not divided further, whatever their style in the plan
        set_held(model.get_parameter(name), cut)
    cuts |= share_layers(model, axes.tensor, decoder_layers(model))
    dispatch_over(axes, model, summed=any(style.sums for style in styles))
    return cuts


def named_parts(model: PreTrainedModel, axes: AxisGroups, prefix: str) -> dict[str, Cut]:
    """Call `take_part`, and prepend ``prefix`` to the parameters' names."""
    return {prefix + name: cut for name, cut in take_part(model, axes).items()}


def share_tied(stages: Sequence[Stage]) -> None:
    """Share each tied weight of ``stages``: use the parameter of the first stage that has it in all of them."""
    owned: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_global_parameters()):
            if name in stage.tied and owned.setdefault(name, parameter) is not parameter:
                replace_parameter(stage, parameter, owned[name])


def replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Use the parameter ``new`` wherever ``module`` uses ``old``."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter is old:
                setattr(child, name, new)
