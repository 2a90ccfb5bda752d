"""Ranks and attackers in the nodes of a netbed."""
