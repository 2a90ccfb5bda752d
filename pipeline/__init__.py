"""Schedules as values: actions, placement, dependencies, generators, simulation. No torch."""
