"""Stages from model folders, and exports into them."""
