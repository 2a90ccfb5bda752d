"""Execution of one step on one rank: prepare micro-batches, run the rank's actions of a schedule, sum the loss."""
