"""`weft schedule`: generate a schedule and print, draw or export it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.lowering import lower
from weft.pipeline.perfetto import write_perfetto
from weft.pipeline.placement import Placement
from weft.pipeline.plot import plot_timelines
from weft.pipeline.profile import load_costs
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import save_text, schedule_to_csv, schedule_to_json
from weft.pipeline.simulation import simulate
from weft.pipeline.text import grid_text, timeline_text
from weft.pipeline.timeline import Timeline
from weft.pipeline.validation import validate


def main(argv: list[str]) -> int:
    """Run ``weft schedule KIND --ranks P --microbatches M ...``; returns the exit code.

    Raises:
        ValueError: an option does not go with the others; names it and the remedy.
    """
    args = _parser().parse_args(argv)
    placement = place(args.kind, args.ranks, args.placement, args.sites, args.chunks)
    costs = costs_of(args.costs, placement)
    schedule = generate(
        args.kind,
        placement,
        args.microbatches,
        costs=costs,
        memory_cap_bytes=args.memory_cap,
        search_seconds=args.search_seconds,
        launch_together=args.together,
    )
    validate(schedule, costs=costs, memory_cap_bytes=args.memory_cap)
    if args.format in ("png", "perfetto"):
        draw(simulate(lower(schedule), costs), args.format, args.out)
    else:
        emit(_text(schedule, costs, args.format, args.out), args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft schedule", description="Generate a schedule; print, draw or export it.")
    parser.add_argument("kind", choices=list(generators()), help="generator of the schedule")
    parser.add_argument("--ranks", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches per step")
    parser.add_argument("--placement", choices=("straight", "fold", "site_fold"), help="default: what the kind needs")
    parser.add_argument("--sites", type=_sizes, default=(), help="ranks per site, as in 4,4; default: one site")
    parser.add_argument("--chunks", type=int, help="virtual stages per rank; default: what the placement has")
    parser.add_argument("--costs", type=Path, help="YAML file with costs; default: F = I = W = 1 s, 1 byte a chunk")
    parser.add_argument("--together", type=int, default=0, help="micro-batches that interleaved launches in a row")
    parser.add_argument("--memory-cap", type=float, help="most bytes of saved activations on any rank")
    parser.add_argument("--search-seconds", type=float, default=2.0, help="time that auto may search")
    parser.add_argument("--format", choices=("text", "json", "torch-csv", "png", "perfetto"), default="text")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ranks per site, as in 4,4") from None


def place(kind: str, num_ranks: int, layout: str | None, sites: tuple[int, ...], chunks: int | None) -> Placement:
    """The placement of ``kind`` over ``num_ranks`` ranks.

    Args:
        layout: straight, fold or site_fold; None takes what the kind needs, and for ``auto``
            over several sites a fold inside each of them.
        sites: ranks per site; empty is one site.
        chunks: virtual stages per rank; None takes what the layout has. Several chunks on a
            straight layout are interleaved.

    Raises:
        ValueError: the numbers do not go together.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks={num_ranks}: a pipeline has at least 1 rank")
    if sites and (min(sites) < 1 or sum(sites) != num_ranks):
        raise ValueError(f"--sites={','.join(map(str, sites))}: they must be positive and sum to --ranks={num_ranks}")
    if chunks is not None and chunks < 1:
        raise ValueError(f"--chunks={chunks}: a rank holds at least 1 virtual stage")
    layout = layout or generators()[kind].default_placement
    if kind == "auto" and layout == "fold" and len(sites) > 1:
        layout = "site_fold"
    if kind == "interleaved" and layout == "straight":
        layout = "interleaved"
    if layout == "interleaved" or (layout == "straight" and (chunks or 1) > 1):
        return Placement.interleaved(num_ranks, chunks or 2, sites)
    if layout == "straight":
        return Placement.straight(num_ranks, sites)
    if layout == "fold":
        return Placement.fold(num_ranks, chunks or 2, sites)
    if not sites:
        raise ValueError("--placement=site_fold: it folds inside each site; give them, as in --sites 4,4")
    return Placement.site_fold(sites, chunks or 2)


def costs_of(path: Path | None, placement: Placement) -> CostModel:
    """The costs in a file, or unit costs."""
    return load_costs(path, placement.num_stages) if path else CostModel.unit(placement.num_stages)


def _text(schedule: Schedule, costs: CostModel, form: str, out: Path | None) -> str:
    if form == "json":
        return schedule_to_json(schedule)
    if form == "torch-csv":
        return schedule_to_csv(schedule)
    width = shutil.get_terminal_size().columns if out is None and sys.stdout.isatty() else None
    return f"{grid_text(schedule, width=width)}\n\n{timeline_text(simulate(lower(schedule), costs))}\n"


def emit(text: str, out: Path | None) -> None:
    """Write ``text`` to a file, or print it."""
    if out is None:
        sys.stdout.write(text)
    else:
        save_text(text, out)


def draw(timeline: Timeline, form: str, out: Path | None) -> None:
    """Write a PNG or a Perfetto trace.

    Raises:
        ValueError: no file was named.
    """
    if out is None:
        raise ValueError(f"--format={form}: it writes a file; name it with --out")
    {"png": plot_timelines, "perfetto": write_perfetto}[form]([timeline], out)
