"""Strands: a forward and a backward, interleaved by a segment plan so that each hides the other's communication."""
