"""The `weft` command, and what stands behind each of its sub-commands."""
