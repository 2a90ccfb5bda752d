"""Members of axis groups, run as threads of one process that share a small model, for checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weft.conf.schema import ContextExchange, SplitKind
from weft.engine.models.batch import Batch, attach_rows_of
from weft.engine.models.skeleton import copied
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.stages.checking.comparison import Outcome, all_parameters, gradients, run_stages
from weft.engine.stages.cutting.context import part_of
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.cutting.stage import Stage

Train = Callable[
    [Callable[[AxisGroups], list[Stage]], AxisGroups, Sequence[Batch], Tensor], tuple[list[Stage], Outcome]
]
"""Function that makes a member's stages for its groups, trains them on its micro-batches, and returns both."""


def members_outcome(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    num_items: Tensor,
    sizes: Mapping[str, int],
    num_stages: int = 1,
    exchange: ContextExchange = ContextExchange.gather,
    train: Train | None = None,
) -> Outcome:
    """Run micro-batches on all members together, each with its part of a copy of the whole model.

    Args:
        batches: whole micro-batches, distributed over the members of an expert group. Members of a context or tensor
            group share each of them.
        train: runs a member's micro-batches. None runs them one after the other.

    Raises:
        Exception: the first error of a member.
    """
    making = threading.Lock()  # transformers patches functions of torch meanwhile
    split = split_layers(model.config, num_stages, SplitKind.even)

    def member(groups: AxisGroups) -> tuple[AxisGroups, dict[str, Cut], Outcome]:
        axes = replace(groups, exchange=exchange)

        def make(axes: AxisGroups) -> list[Stage]:
            with making:
                return stages_from_model(copied(model), split, range(num_stages), axes)

        apart = max(1, axes.expert.size // axes.tensor.size)
        mine = []
        for batch in batches[axes.expert.index // axes.tensor.size % apart :: apart]:
            mine.append(part_of(batch, axes.context))
            attach_rows_of(mine[-1]["position_ids"], batch["position_ids"])
        stages, outcome = (train or _train_in_turn)(make, axes, mine, num_items)
        return axes, {name: cut for stage in stages for name, cut in stage.cuts.items()}, outcome

    results = run_in_threads(dict(sizes), member)
    firsts = [(axes, outcome) for axes, _, outcome in results if axes.tensor.index == 0]
    in_turn = [outcome.logits for axes, outcome in firsts if axes.context.index == 0]
    return Outcome(
        torch.stack(in_turn, 1).flatten(0, 2),
        torch.stack([outcome.loss for _, outcome in firsts]).sum(),
        _summed(model, [(cuts, outcome) for _, cuts, outcome in results]),
    )


def _train_in_turn(
    make: Callable[[AxisGroups], list[Stage]], axes: AxisGroups, batches: Sequence[Batch], num_items: Tensor
) -> tuple[list[Stage], Outcome]:
    stages = make(axes)
    last = stages[-1]
    losses, logits = [], []
    for batch in batches:
        output = last.output(run_stages(stages[:-1], batch), batch, num_items)
        output.loss.backward()
        losses.append(output.loss.detach())
        with torch.no_grad():
            logits.append(last.whole_logits(output.logits))
    return stages, Outcome(torch.stack(logits), torch.stack(losses).sum(), gradients(stages))


def _summed(model: PreTrainedModel, results: Sequence[tuple[Mapping[str, Cut], Outcome]]) -> dict[str, Tensor]:
    """Return the gradients of whole parameters, summed over the members' parts."""
    totals: dict[str, Any] = {name: torch.zeros_like(p, requires_grad=False) for name, p in all_parameters([model])}
    for cuts, outcome in results:
        for name, gradient in outcome.gradients.items():
            if name in cuts:
                placed = torch.zeros_like(totals[name])
                cuts[name].put(gradient, placed)
                gradient = placed
            totals[name] += gradient
    return totals
