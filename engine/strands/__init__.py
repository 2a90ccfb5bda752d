"""Running two strands of a pair alternately, as a segment plan says."""
