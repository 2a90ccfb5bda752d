"""The WAN channel: many authenticated TCP connections per link, in a native thread."""
