"""What papers claim, beside what Weft's models say."""
