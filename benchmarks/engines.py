"""Weft's engine compared with DeepSpeed's and torch's: on one host, across sites, and sharded over a slow link."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers import on_host, on_sites, sharded

GROUNDS = {"host": on_host.main, "sites": on_sites.main, "sharded": sharded.main}


def main(argv: Sequence[str]) -> int:
    """Run ``host|sites|sharded [options]`` and return 1 if a goal is missed."""
    ground, *rest = argv or [""]
    if ground in ("-h", "--help"):
        print(f"usage: python -m benchmarks engines {'|'.join(GROUNDS)} [-h] ...\n\n{__doc__}")
        return 0
    if ground not in GROUNDS:
        raise ValueError(f"engines {ground}: say where to run them: {', '.join(GROUNDS)}")
    return GROUNDS[ground](rest)
