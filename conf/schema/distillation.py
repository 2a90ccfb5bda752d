"""Distillation: training against a teacher's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from weft.conf.schema.ranges import NATURAL, POSITIVE, Range


@dataclass(kw_only=True)
class DistillConfig:
    """Distillation from a teacher with the same tokens."""

    enabled: bool = False
    """Train against a teacher's probabilities."""
    teacher: str = ""
    """Folder or hub name of the teacher, whose tokens must be the student's. Each rank with the last stage holds the
    whole teacher, in `train.precision`, or with `inference.scores.enabled` the host."""
    weight: Annotated[float, Range(0, 1)] = 0.5
    """Share of the divergence from the teacher in the loss; the rest is the cross-entropy of the labels."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Divide the logarithms of both distributions by it. The divergence is multiplied by its square, so that gradients
    keep their scale (Hinton et al. 2015)."""
    top_k: Annotated[int, NATURAL] = 64
    """Compare the teacher's most likely tokens only, of those that the student has; 0 compares the whole vocabulary."""
    tail: bool = True
    """Compare all other tokens of the teacher, too, as one token with the sum of their probabilities. false compares
    the distributions within the most likely tokens."""
