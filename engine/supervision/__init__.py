"""Supervision of a run: progress of ranks, the culprit, agents and driver."""
