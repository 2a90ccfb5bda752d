"""Commands of supervision, and its check of clocks."""
