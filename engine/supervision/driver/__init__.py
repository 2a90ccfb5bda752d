"""The driver of a run: its decisions, its hosts, and the diagnosis of failures."""
