"""The driver of a run: decisions, hosts, and the diagnosis of failures."""
