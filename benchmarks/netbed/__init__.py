"""Ranks in the nodes of a netbed."""
