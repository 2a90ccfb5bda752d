"""A job of which this process is one rank, and every other rank is emulated where ranks meet (NeuronaBox)."""
