"""Emulated strands: compute that sleeps, real collectives over links that take their time."""
