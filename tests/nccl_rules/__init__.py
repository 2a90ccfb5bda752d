"""A stand-in for NCCL on CPUs that keeps the rules which one GPU cannot show and gloo does not have."""
