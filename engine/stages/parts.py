"""What a rank holds of a model that the members of axis groups share out."""

from __future__ import annotations

from transformers import PreTrainedModel

from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.experts import dispatch_over, expert_cuts, hold_parts
from weft.engine.parallel.tensor import share_layers
from weft.engine.parallel.unshareable import UnshareableError
from weft.engine.stages.skeleton import decoder_layers


def take_part(model: PreTrainedModel, axes: AxisGroups) -> dict[str, Cut]:
    """Reduce a model to this rank's part of it, in place.

    Returns:
        What is held of those parameters that are not held in full, by name.

    Raises:
        ValueError: the model cannot be divided so.
    """
    if axes.tensor.size > 1 and axes.expert.size > 1:
        raise UnshareableError(
            f"parallel.tensor={axes.tensor.size}: not supported together with parallel.expert={axes.expert.size} yet; "
            "set one of them to 1"
        )
    if axes.tensor.size > 1:
        return share_layers(model, axes.tensor, decoder_layers(model))
    cuts = expert_cuts(model, axes.expert)
    hold_parts(model, cuts)
    dispatch_over(axes.expert, model)
    return cuts


def named_parts(model: PreTrainedModel, axes: AxisGroups, prefix: str) -> dict[str, Cut]:
    """The same, with ``prefix`` before the names."""
    return {prefix + name: cut for name, cut in take_part(model, axes).items()}
