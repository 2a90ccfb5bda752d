"""The loss that a recipe minimises, and the scores of a frozen model that it needs."""

from __future__ import annotations

from weft.conf.features import entry
from weft.conf.schema import DataKind, WeftConfig
from weft.engine.data import MicrobatchLoader
from weft.engine.engine import WeftEngine
from weft.engine.models.objective import Objective
from weft.engine.models.preference import REFERENCE, label_log_probs, preference_objective
from weft.engine.scores import Ahead, InitialWeights, Score, StepScores


def objective_of(config: WeftConfig) -> Objective | None:
    """Return the loss to minimise instead of the model's own, or None."""
    if config.data.kind is not DataKind.preference:
        return None
    loss = config.train.preference
    return preference_objective(loss.beta, loss.label_smoothing)


def open_scores(config: WeftConfig, engine: WeftEngine, loader: MicrobatchLoader) -> None:
    """Attach the scores that the loss needs to the engine's micro-batches. The engine has the initial weights."""
    if config.data.kind is DataKind.preference:
        reference = InitialWeights(engine.sharding)
        settings = config.inference.scores
        scorers = entry("prefill").scorers(config) if settings.enabled and engine.holds_loss else []
        engine.scores = StepScores(
            engine,
            Score(REFERENCE, label_log_probs),
            frozen=reference.active,
            ahead=Ahead([each.log_probs for each in scorers]) if scorers else None,
            peek=loader.peek,
            steps_ahead=settings.steps if settings.enabled else 0,
        )
