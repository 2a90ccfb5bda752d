"""Errors for a model or an input whose work the members of an axis cannot share."""


class UnshareableError(ValueError):
    """Names the field, its value, and what to do."""
