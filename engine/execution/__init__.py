"""One step on one rank: batches in, a schedule's row executed, sums out."""
