"""Emulation: emulated steps compared with real ones, and what-ifs with real changes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.emulations.both_ways import Beside, compare
from benchmarks.emulations.layouts import CHANGES, LAYER_MS, LAYOUTS, work_of_layers
from benchmarks.peers.emulated_stage import EmulatedWork
from benchmarks.peers.layout import Layout, Links, measured_links, wan_topology
from benchmarks.results import parse, show, write_json
from weft.tools.links import Way, measure_link
from weft.tools.tables import table_of

GOAL, MOST = 0.005, 0.015
"""Error of the median that most jobs keep to, and that all do.

Each is besides the real job's own difference between runs. Where real runs differ by more than the second, the machine
was too busy to tell, and nothing is shown.
"""
PARTS = ("jobs", "what-ifs")
Figures = dict[str, list[dict[str, Any]]]
"""Rows of each part."""


def main(argv: Sequence[str]) -> int:
    """Run ``[--parts PART ...] [--jobs NAME ...] ...`` and return 1 if an error exceeds its goal or cannot be shown.

    Real and emulated steps of a job alternate.

    Raises:
        ValueError: there is no such job, or the results to add to cannot be read.
    """
    args = parse(_parser(), argv, parts=PARTS, jobs=[layout.name for layout in LAYOUTS], what_ifs=list(CHANGES))
    if not 0 < args.layer_ms <= 1000:
        raise ValueError(f"--layer-ms {args.layer_ms}: give milliseconds above 0 and at most 1000")
    figures = _earlier(args)
    changes = {name: CHANGES[name] for name in args.what_ifs or CHANGES if "what-ifs" in args.parts}
    jobs = [each for each in LAYOUTS if "jobs" in args.parts and each.name in (args.jobs or [each.name])]
    wanted = [*jobs, *(layout for pair in changes.values() for layout in pair)]
    work = work_of_layers(args.layer_ms)
    run = _runner(args, _links(wanted, work), work) if wanted else None

    def keep(part: str, rows: Iterable[Any]) -> None:
        found = [{"name": row.name, **asdict(row)} for row in rows]
        names = [row["name"] for row in found]
        figures[part] = [row for row in figures[part] if row["name"] not in names] + found
        write_json(args, "emulation", figures, met=_met(figures))  # at once: a run of many jobs may be cut short

    if run is not None:
        for layout in jobs:
            beside = run(layout)
            print(", ".join(f"{name} {value}" for name, value in _row(beside).items()), flush=True)
            keep("jobs", [beside])
        for layout in dict.fromkeys(layout for pair in changes.values() for layout in pair):
            keep("what-ifs", [run(layout)])
    _show(figures)
    return 0 if _met(figures) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks emulation", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    names = ", ".join(layout.name for layout in LAYOUTS)
    parser.add_argument("--jobs", nargs="*", metavar="NAME", help=f"of {names}; default all")
    parser.add_argument("--what-ifs", nargs="*", metavar="NAME", help=f"of {', '.join(CHANGES)}; default all")
    parser.add_argument("--rounds", type=int, default=2, help="real and emulated runs of each, in one start")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--layer-ms", type=float, default=LAYER_MS, help="of a layer's forward and of each gradient")
    parser.add_argument("--at-once", type=int, default=2, help="an emulation's real ranks that run side by side")
    parser.add_argument("--add", action="store_true", help="to what --json FILE has of other jobs")
    return parser


def _earlier(args: argparse.Namespace) -> Figures:
    """Return the rows that the result file already has."""
    none: Figures = {part: [] for part in PARTS}
    if not args.add:
        return none
    if args.json is None:
        raise ValueError("--add: to which file? give --json FILE")
    if not args.json.exists():
        return none
    try:
        found = json.loads(args.json.read_text())["figures"]
        return {part: list(found[part]) for part in PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--json {args.json}: is none of this bench, and cannot be added to: {error!r}") from error


def _runner(args: argparse.Namespace, links: Links, work: EmulatedWork) -> Callable[[Layout], Beside]:
    return partial(compare, links=links, work=work, rounds=args.rounds, steps=args.steps, at_once=args.at_once)


def _links(layouts: Sequence[Layout], work: EmulatedWork) -> Links:
    """Return the links of these jobs, measured between pauses as long as a layer.

    Links between sites are measured on a netbed of their own.
    """
    local = measure_link(work.hidden_bytes, Way.shared, idle_s=work.forward_s)
    apart = any(layout.sites for layout in layouts)
    return replace(measured_links(wan_topology((2, 1)), work) if apart else Links(), local=local)


def _show(figures: Figures) -> None:
    steps = {name: _beside(row) for name, row in _named(figures["what-ifs"]).items()}
    jobs = list(map(_beside, figures["jobs"]))
    if jobs:
        show(table_of(map(_row, jobs), "A step emulated and real"))
        print(
            f"within {GOAL:.1%}: {sum(_within(each, GOAL) for each in jobs)} of {len(jobs)}; "
            f"within {MOST:.1%}: {sum(_within(each, MOST) for each in jobs)}"
        )
    changes = [
        _change_row(steps[before.name], steps[after.name])
        for before, after in CHANGES.values()
        if {before.name, after.name} <= steps.keys()
    ]
    if changes:
        show(table_of(changes, "What a change does to the step"))


def _met(figures: Figures) -> bool:
    jobs = list(map(_beside, figures["jobs"]))
    met = all(_within(beside, MOST) for beside in jobs)
    return met and 4 * sum(_within(beside, GOAL) for beside in jobs) >= 3 * len(jobs)


def _named(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row["name"]: row for row in rows}


def _beside(row: Mapping[str, Any]) -> Beside:
    return Beside(**row)


def _row(beside: Beside) -> dict[str, object]:
    return {
        "job": beside.name,
        "ranks": beside.ranks,
        "real": f"{1e3 * median(beside.real_s):.1f} ms",
        "runs differ": f"{beside.own:.2%}",
        "emulated": f"{1e3 * median(beside.emulated_s):.1f} ms",
        "error": f"{beside.error:+.2%}",
        f"within {GOAL:.1%}": _verdict(beside, GOAL),
        f"within {MOST:.1%}": _verdict(beside, MOST),
    }


def _change_row(before: Beside, after: Beside) -> dict[str, object]:
    real = median(after.real_s) / median(before.real_s) - 1
    emulated = median(after.emulated_s) / median(before.emulated_s) - 1
    return {
        "what if": after.name,
        "ranks": after.ranks,
        "real before": f"{1e3 * median(before.real_s):.1f} ms",
        "real after": f"{1e3 * median(after.real_s):.1f} ms",
        "real change": f"{real:+.2%}",
        "predicted change": f"{emulated:+.2%}",
        "off by": f"{100 * (emulated - real):+.2f} points",
        "runs differ": f"{max(before.own, after.own):.2%}",
    }


def _verdict(beside: Beside, goal: float) -> str:
    if beside.own > MOST:
        return f"not shown: real runs differ by {beside.own:.1%}"
    return "yes" if _within(beside, goal) else "no"


def _within(beside: Beside, goal: float) -> bool:
    """True if the error is no larger than the goal, on a machine that was not too busy."""
    return beside.own <= MOST and abs(beside.error) <= goal + beside.own
