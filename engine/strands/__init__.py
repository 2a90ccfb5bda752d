"""Running two strands of a pair by turns, as a segment plan says."""
