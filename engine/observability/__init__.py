"""Measurements of a step for other readers: clocks, timelines, bubble marks."""
