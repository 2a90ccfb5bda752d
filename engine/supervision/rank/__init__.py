"""The side of a rank: its attempts and its published progress."""
