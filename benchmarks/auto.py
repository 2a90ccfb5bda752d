"""`auto` compared with fixed schedules on random clusters, and with the proven optimum."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.planning import clusters, duels, optimal
from benchmarks.results import finish, parse

PARTS = {"duels": duels, "clusters": clusters, "optimal": optimal}


def main(argv: Sequence[str]) -> int:
    """Run ``[--parts PART ...]`` and return 1 if a part misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks auto", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    for part in PARTS.values():
        part.add_options(parser)
    args = parse(parser, argv, parts=PARTS)
    found = {name: PARTS[name].measure(args) for name in args.parts}
    figures = {name: of_part for name, (of_part, _) in found.items()}
    return finish(args, "auto", figures, met=all(met for _, met in found.values()))
