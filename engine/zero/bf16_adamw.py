"""AdamW whose moments have bf16, rounded up or down by step so that errors cancel, on any parts of parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.engine.zero.adamw import CompactAdamW, update

_GOLDEN = (math.sqrt(5) - 1) / 2


class Bf16AdamW(CompactAdamW):
    """torch's AdamW, computed in fp32, with moments that are stored in bf16.

    A second moment that is rounded to nearest never decays, because a step changes it by less than half of a bf16
    number's last digit. So the threshold above which moments are rounded up differs in each step, and takes all values
    equally often. It is the same for all elements: results depend neither on shards nor on a generator.
    """

    def _step(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, names = self.state[weight], ("exp_avg", "exp_avg_sq")  # torch's, so that either resumes the other
        if not state:
            state["step"] = 0
            state.update((name, torch.zeros_like(weight, dtype=torch.bfloat16)) for name in names)
        state["step"] += 1
        moments = [state[name].float() for name in names]
        update(weight, gradient, moments, state["step"], group)
        for name, moment in zip(names, moments, strict=True):
            state[name].copy_(_round(moment, state["step"]))


def _round(moment: Tensor, step: int) -> Tensor:
    """Round fp32 numbers to bf16 ones in place. Multiples of the golden ratio spread evenly between 0 and 1."""
    threshold = int(step * _GOLDEN % 1 * 2**16)
    moment.view(torch.int32).add_(threshold).bitwise_and_(-(2**16))
    return moment
