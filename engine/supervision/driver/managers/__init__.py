"""Cluster managers: Slurm and Kubernetes, and the starters of agents."""
