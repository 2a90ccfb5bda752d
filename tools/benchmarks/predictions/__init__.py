"""Layouts whose step is predicted and measured, for `weft bench prediction`."""
