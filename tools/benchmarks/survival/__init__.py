"""Faults for `weft bench survive`, and how they are done to a run."""
