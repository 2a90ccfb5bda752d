"""Checks of stages and of divided layers on small copies of a model."""
