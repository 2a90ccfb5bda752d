"""What a step measures of itself, and tells others: clocks, timelines, bubble marks."""
