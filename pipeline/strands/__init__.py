"""Strand pairs in plans: the forward of one micro-batch and the backward of another, interleaved (DHelix)."""
