"""Measurements of steps: clocks, timelines, usage, and observers of a rank's progress."""
