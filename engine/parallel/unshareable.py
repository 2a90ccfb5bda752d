"""Error for a model or an input whose work the members of an axis cannot share."""


class UnshareableError(ValueError):
    """A model or an input cannot be divided. The message has the field, its value and the remedy."""
