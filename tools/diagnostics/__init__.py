"""Checks of a host and of the connections between ranks, light enough to run after every fault."""
