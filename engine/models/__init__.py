"""Whole models before they are cut: skeletons, initialisation, adapters, sizes, losses."""
