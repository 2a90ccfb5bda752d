"""Commands for supervised runs, and the check of clocks."""
