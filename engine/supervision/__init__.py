"""Supervision of a run: agents, the driver, the ranks' progress, and diagnosis of failures."""
