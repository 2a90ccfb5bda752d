"""Whole models, before any cut: skeletons, initialisation, adapters, sizes, losses."""
