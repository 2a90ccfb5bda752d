"""The WAN channel: many authenticated TCP connections per pair of ranks, outside Python's lock."""
