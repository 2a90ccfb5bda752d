"""What a rank holds of a model that the members of axis groups share out."""

from __future__ import annotations

from transformers import PreTrainedModel

from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.experts import dispatch_over, expert_cuts, hold_parts


def take_part(model: PreTrainedModel, axes: AxisGroups) -> dict[str, Cut]:
    """Reduce a model to this rank's part of it, in place.

    Returns:
        What is held of those parameters that are not held in full, by name.

    Raises:
        ValueError: the model cannot be divided so.
    """
    cuts = expert_cuts(model, axes.expert)
    hold_parts(model, cuts)
    dispatch_over(axes.expert, model)
    return cuts


def named_parts(model: PreTrainedModel, axes: AxisGroups, prefix: str) -> dict[str, Cut]:
    """The same, with ``prefix`` before the names."""
    return {prefix + name: cut for name, cut in take_part(model, axes).items()}
