"""Memory checkpoints: copies in the memory of this host and of one other host, from which a supervised run recovers."""
