"""Strands: the forward of one micro-batch and the backward of another, interleaved inside of a layer (DHelix)."""
