"""Parts of the benchmark of schedules that adapt."""
