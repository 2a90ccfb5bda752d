"""Layers that take the time they are told to, for schedules on machines without GPUs."""
