"""Layers that take a given time, for schedules on machines without GPUs."""
