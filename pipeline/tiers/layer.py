"""The layer tier: which gradient a layer's backward computes first (Centauri equation 1)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import isclose


class First(Enum):
    """The gradient that a layer's backward computes first."""

    input_gradients = "input gradients"
    weight_gradients = "weight gradients"


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Times T(...) of equation 1 for the backward of one layer.

    Attributes:
        w_ag: all-gather of its weights (ZeRO-3).
        g_act: input gradients.
        g_w: weight gradients.
        act_ag, act_rs: tensor-parallel collectives on activations.
        g_w_rs: reduce-scatter of its weight gradients.
        others: compute that follows and depends on neither gradient.
    """

    g_act: float
    g_w: float
    g_w_rs: float
    w_ag: float = 0.0
    act_ag: float = 0.0
    act_rs: float = 0.0
    others: float = 0.0


@dataclass(frozen=True)
class LayerPlan:
    """The order of a layer's backward, with T1 (input gradients first) and T2 (weight gradients first)."""

    first: First
    t1: float
    t2: float
    reason: str

    @property
    def gains_by_input_first(self) -> bool:
        """True if computing input gradients first is strictly faster."""
        return self.t1 < self.t2 and not isclose(self.t1, self.t2)


def layer_tier(c: LayerCosts) -> LayerPlan:
    """Return the faster order by equation 1; on a tie input gradients first, because the previous stage waits."""
    t1 = c.w_ag + max(c.g_act, c.act_ag) + max(c.g_w, c.act_rs) + max(c.g_w_rs, c.others)
    t2 = c.act_ag + max(c.g_w, c.w_ag) + max(c.g_act, c.g_w_rs) + c.act_rs + c.others
    if t1 <= t2:
        return LayerPlan(First.input_gradients, t1, t2, f"T1 {t1:.3g} <= T2 {t2:.3g}: nothing gained by weights first")
    return LayerPlan(First.weight_gradients, t1, t2, f"T2 {t2:.3g} < T1 {t1:.3g}: input gradients hide the reduction")
