"""Faults in supervised runs: the culprit, the time to the next step, and lost steps."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import monotonic

from benchmarks.results import finish, parse, show, write_json
from benchmarks.survival.hosts import BedHosts
from benchmarks.survival.outcome import NAMED_WITHIN_S, NEXT_STEP_WITHIN_S, ROUNDING, Survival
from benchmarks.survival.session import SESSIONS, Outcomes
from weft.tools.netbed.bed import missing
from weft.tools.tables import table_of

SETTINGS = (
    "recipe=quickstart",
    "cluster=two_sites",
    "cluster.master_port=29517",
    "pipeline.stages=4",
    "pipeline.microbatches=4",
    "comm.connections=2",
    "zero.stage=1",
    "model.overrides.hidden_size=64",
    "model.overrides.intermediate_size=128",
    "model.overrides.num_hidden_layers=4",
    "model.self_check=false",
    "data.sequence_length=64",
    "train.steps=1000000",
    "train.max_seconds=0",
    "train.export=false",
    "train.timeline=false",
    "train.sample=''",
    "checkpoint.every=50",
    "checkpoint.memory_every=5",
    "logging.progress=false",
    "supervise.compare_every=1",
)


def main(argv: Sequence[str]) -> int:
    """Run ``survive [--only TEXT ...] [key=value ...]`` and return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks survive", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="only faults whose name contains one")
    parser.add_argument("--list", action="store_true", help="print the names of all faults, by run")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further run after so many")
    parser.add_argument("--folder", type=Path, help="leave the runs there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `weft launch`")
    args = parse(parser, argv)
    if args.list:
        for number, session in enumerate(SESSIONS):
            print(*(f"run {number}: {fault.name}" for fault in session.faults), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="weft-survive-") as temporary:
        return _faults(args, args.folder or Path(temporary), [*SETTINGS, *args.overrides])


def _faults(args: argparse.Namespace, folder: Path, settings: Sequence[str]) -> int:
    found: list[Survival] = []

    def tell(outcome: Survival) -> None:
        found.append(outcome)
        print(*outcome.row.values(), sep=" | ", file=sys.stderr, flush=True)
        write_json(args, "survive", _figures(found))

    try:
        _run(Outcomes(folder, settings, tell), args)
    except (KeyboardInterrupt, SystemExit):  # the latter upon SIGTERM
        print("stopped: these are the faults so far", file=sys.stderr)
    show(table_of((each.row for each in found), "8 ranks on 4 hosts of 2 sites", left=2))
    met = bool(found) and all(each.met for each in found)
    goals = f"named within {NAMED_WITHIN_S:g} s, next step within {NEXT_STEP_WITHIN_S:g} s, losses equal"
    print(f"{goals} (to {ROUNDING:g} where replicas became fewer): {'met' if met else 'MISSED'}")
    return finish(args, "survive", _figures(found), met=met)


def _run(outcomes: Outcomes, args: argparse.Namespace) -> None:
    begun = monotonic()
    with closing(outcomes):
        for session in SESSIONS:
            chosen = [fault for fault in session.faults if any(text in fault.name for text in args.only)]
            if not chosen:
                continue
            if monotonic() - begun > 60.0 * args.minutes:
                print(f"--minutes: not begun: {', '.join(fault.name for fault in chosen)}", file=sys.stderr)
            elif session.hosts is BedHosts and missing():
                print(f"left out, for {missing()}: {', '.join(fault.name for fault in chosen)}", file=sys.stderr)
            else:
                outcomes.run(session, chosen)


def _figures(found: Sequence[Survival]) -> list[dict[str, object]]:
    return [asdict(each) | {"met": each.met} for each in found]
