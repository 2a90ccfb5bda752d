"""The `weft` command and its sub-commands."""
