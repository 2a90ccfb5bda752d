"""Scores of a frozen model that a step's loss needs, such as a reference's or a teacher's log-probabilities."""

from weft.engine.scores.ahead import Ahead
from weft.engine.scores.initial_weights import InitialWeights
from weft.engine.scores.step_scores import Score, StepScores

__all__ = ["Ahead", "InitialWeights", "Score", "StepScores"]
