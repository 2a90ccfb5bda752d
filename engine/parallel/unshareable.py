"""Error for a model or an input whose work the members of an axis cannot share."""


class UnshareableError(ValueError):
    """Error for a model or an input that a group cannot divide. The message has the field, its value and the remedy."""
