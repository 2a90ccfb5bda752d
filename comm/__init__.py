"""Channels, process groups and link probes: how tensors move between ranks."""
