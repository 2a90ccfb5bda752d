"""What a run will be: placement, stages, schedules, collectives, memory, from costs measured or estimated."""
