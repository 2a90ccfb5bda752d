"""Execution of one step on one rank: prepares batches, executes a schedule's row, sums losses and counts."""
