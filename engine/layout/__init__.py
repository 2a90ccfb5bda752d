"""The ranks of a job: where each stands, and which hand tensors to each other."""
