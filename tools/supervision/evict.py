"""`weft evict`: exclude hosts from runs, or list the excluded hosts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from weft.conf.compose import compose
from weft.engine.supervision.driver.files import Denial, DenyList


def main(argv: Sequence[str]) -> int:
    """Run ``weft evict HOST ... [--reason TEXT] [key=value ...]`` or ``weft evict --list``.

    Raises:
        ValueError: no host is named, or the deny-list cannot be read.
    """
    parser = command_parser(
        "evict", "Keep hosts out of runs. A run that has them goes on without them at its next attempt."
    )
    parser.add_argument("--reason", default="evicted by hand", help="why, in one line")
    parser.add_argument("--list", action="store_true", help="show who is kept out, and why")
    hosts, denied, args = parse_hosts(parser, argv)
    if not hosts and not args.list:
        raise ValueError("no host is named; `weft evict HOST`, or `weft evict --list`")
    for host in hosts:
        denied.evict(host, args.reason)
        print(f"{host} is kept out of runs, by {denied.path}")
    if args.list:
        if entries := denied.read():
            Console().print(deny_table(entries))
        else:
            print(f"{denied.path}: no host is kept out")
    return 0


def deny_table(entries: Mapping[str, Denial]) -> Table:
    """Return a table of denied hosts, with time and reason."""
    table = Table("host", "since", "by", "reason")
    for host, denial in sorted(entries.items()):
        table.add_row(host, datetime.fromtimestamp(denial.at).isoformat(" ", "seconds"), denial.by, denial.reason)
    return table


def command_parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command over hosts; its other words are settings."""
    parser = argparse.ArgumentParser(
        prog=f"weft {command}",
        usage=f"weft {command} HOST ... [options] [key=value ...]",
        description=f"{description} cluster.deny_list and train.output_dir determine the file.",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="HOST", help="as the hostfile names it")
    return parser


def parse_hosts(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[list[str], DenyList, argparse.Namespace]:
    """Return the hosts, the deny-list of the settings, and the options. Raise ValueError if a setting is wrong."""
    args = parser.parse_intermixed_args(list(argv))
    hosts = [word for word in args.words if "=" not in word]
    config = compose([word for word in args.words if "=" in word])
    return hosts, DenyList.of(config.cluster.deny_list, config.train.output_dir), args
