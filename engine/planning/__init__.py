"""The plan of a run: placement, stages, schedules, collectives and memory, from measured or estimated costs."""
