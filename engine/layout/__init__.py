"""The ranks of a job: their positions along the axes, and the pairs of ranks that exchange tensors."""
