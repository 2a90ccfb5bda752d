"""The plan of a run: placement, stages, schedules, collectives, memory, from costs measured or estimated."""
