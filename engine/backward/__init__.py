"""Backwards in one part or in two: the input gradient now, the weight gradients later."""

from weft.engine.backward.split import SavedForward, SplitBackward

__all__ = ["SavedForward", "SplitBackward"]
