"""Cluster managers: requests for hosts, and the hosts of an allocation."""
