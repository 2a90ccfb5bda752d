"""Cluster managers: how a run asks them for hosts, and what it finds when it has them."""
