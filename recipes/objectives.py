"""The loss that a recipe minimises, and the scores of a frozen model that it needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from weft.conf.features import entry
from weft.conf.schema import DataKind, WeftConfig
from weft.engine.data import MicrobatchLoader
from weft.engine.engine import WeftEngine
from weft.engine.models.distillation import TEACHER
from weft.engine.models.objective import Objective
from weft.engine.models.preference import REFERENCE, label_log_probs, preference_objective
from weft.engine.scores import Ahead, InitialWeights, Score, StepScores
from weft.engine.scores.ahead import Scorer, refuse_implausible, refuse_other_tokens


def objective_of(config: WeftConfig) -> Objective | None:
    """Return the loss to minimise instead of the model's own, or None."""
    if config.data.kind is not DataKind.preference:
        return None
    loss = config.train.preference
    return preference_objective(loss.beta, loss.label_smoothing)


def open_scores(config: WeftConfig, engine: WeftEngine, loader: MicrobatchLoader) -> None:
    """Attach the scores that the loss needs to the engine's micro-batches. The engine has the initial weights.

    Raises:
        ValueError: `distill.top_k` is all of the student's tokens, which workers do not send.
    """
    settings, top_k = config.inference.scores, config.distill.top_k
    opened = partial(StepScores, engine, peek=loader.peek, steps_ahead=settings.steps if settings.enabled else 0)
    if config.data.kind is DataKind.preference:
        ahead = _ahead(config, engine, lambda worker: worker.log_probs)
        engine.scores = opened(
            Score(REFERENCE, label_log_probs), frozen=InitialWeights(engine.sharding).active, ahead=ahead
        )
    elif config.distill.enabled and settings.enabled:
        words = engine.plan.facts.model.vocab_size
        if top_k >= words:
            raise ValueError(f"distill.top_k={top_k}: the student has {words} tokens; choose fewer, such as 64")
        check = partial(refuse_other_tokens, words=words)
        ahead = _ahead(config, engine, lambda worker: partial(worker.top_log_probs, top_k=top_k, words=words), check)
        assert engine.teacher is not None
        score = Score(TEACHER, of_batches=engine.teacher.scores_of_tokens, of_tokens=lambda tokens, _: tokens)
        engine.scores = opened(score, ahead=ahead)


def _ahead(
    config: WeftConfig,
    engine: WeftEngine,
    score: Callable[[Any], Scorer],
    check: Callable[[np.ndarray], None] = refuse_implausible,
) -> Ahead | None:
    """Return the requests to the run's workers, on ranks that compute the loss, or None."""
    workers = entry("prefill").scorers(config) if config.inference.scores.enabled and engine.holds_loss else []
    return Ahead(list(map(score, workers)), check=check) if workers else None
