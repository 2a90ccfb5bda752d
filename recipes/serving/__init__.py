"""Commands that serve prefills in the bubbles of training: `weft serve` and `weft controller`."""
