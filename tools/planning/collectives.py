"""`weft plan recipe=NAME`: how a run's collectives would be partitioned and overlapped, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from weft.comm.collectives import AlphaBeta, CollectiveCosts, LinkClass
from weft.conf.batch import check_world, num_replicas
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.conf.hosts import world_size
from weft.tools.dry_run import expected_plan, overlap_lines


def main(argv: Sequence[str]) -> int:
    """Run ``weft plan [--nodes N] [--intra US:GBPS --inter US:GBPS] [recipe=NAME] [key=value ...]``.

    Raises:
        ValueError: bad input, or a run without replicas.
    """
    args, overrides = _parser().parse_known_args(argv)
    config = compose(overrides)
    check(config)
    config = check_world(config, world_size(config.cluster))
    if num_replicas(config, world_size(config.cluster)) < 2:
        raise ValueError(
            f"cluster.ranks={config.cluster.ranks}: with pipeline.stages={config.pipeline.stages} there is one replica "
            "and nothing to reduce; start more ranks"
        )
    given = {LinkClass.intra: args.intra, LinkClass.inter: args.inter}
    costs = (
        CollectiveCosts.of_links({link: line for link, line in given.items() if line}) if any(given.values()) else None
    )
    plan = expected_plan(config, num_nodes=args.nodes, collectives=costs)
    print("\n".join(overlap_lines(config, plan)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft plan",
        usage="weft plan [options] [recipe=NAME] [key=value ...]",
        description="Primitive, group and workload partition of ZeRO's collectives, and the three tiers' choices.",
        allow_abbrev=False,
    )
    parser.add_argument("--nodes", type=int, default=1, help="nodes under a stage's replicas, if there is no hostfile")
    text = "links as microseconds:Gbit/s of a rank, instead of what `python -m benchmarks collectives` measured"
    parser.add_argument("--intra", type=_line, metavar="US:GBPS", help=f"{text}; inside a node")
    parser.add_argument("--inter", type=_line, metavar="US:GBPS", help="the same between nodes")
    return parser


def _line(text: str) -> AlphaBeta:
    try:
        alpha_us, gbps = map(float, text.split(":"))
        if alpha_us < 0 or gbps <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected microseconds:Gbit/s, as in 20:100") from None
    return AlphaBeta(alpha_us / 1e6, 8e-9 / gbps)
