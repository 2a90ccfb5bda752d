"""Layouts whose step is predicted and measured, for `benchmarks prediction`."""
