"""`weft doctor`: check the links between sites, a host, the connections between ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from weft.conf.features import FEATURES, require
from weft.tools.diagnostics import options

_CHECKS = {check: f"weft.tools.diagnostics.{check}" for check in ("node", "ring", "cache")} | {
    check: module for feature in FEATURES.values() for check, module in feature.checks.items()
}
_OWNERS = {check: name for name, feature in FEATURES.items() for check in feature.checks}


def main(argv: Sequence[str]) -> int:
    """Run ``weft doctor CHECK ...`` and return the exit code.

    Raises:
        ValueError: the check needs a feature that is not installed, or bad input.
    """
    parser = argparse.ArgumentParser(prog="weft doctor", description=__doc__)
    checks = parser.add_subparsers(dest="check", required=True)
    options.add_net_options(checks.add_parser("net", help="probe the links between sites", description=options.NET))
    options.add_node_options(checks.add_parser("node", help="check this host", description=options.NODE))
    options.add_ring_options(
        checks.add_parser("ring", help="check the connections between ranks", description=options.RING)
    )
    options.add_cache_options(checks.add_parser("cache", help="list or clear measurements", description=options.CACHE))
    args = parser.parse_args(argv)
    if args.check in _OWNERS:
        require(_OWNERS[args.check], f"weft doctor {args.check}")
    code: int = import_module(_CHECKS[args.check]).run(args)  # most import torch
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
