"""`weft schedule`: generate a schedule and print, draw or export it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weft.conf.host.files import require_writable, write_atomic
from weft.conf.schema.parallel import MOST_JITTER_SAMPLES
from weft.pipeline.cell import add_relays, side_by_side
from weft.pipeline.choice import Choice, choose, placements
from weft.pipeline.costs import CostModel
from weft.pipeline.generators import generate, generators
from weft.pipeline.limits import MOST_LEGS, MOST_RANKS, check_size, count, number
from weft.pipeline.lowering import as_run, lower
from weft.pipeline.perfetto import write_perfetto
from weft.pipeline.placement import LAYOUTS, Placement
from weft.pipeline.plot import plot_timelines
from weft.pipeline.profile import load_costs, load_pieces
from weft.pipeline.schedule import Schedule
from weft.pipeline.serialization import schedule_to_csv, schedule_to_json
from weft.pipeline.simulation import simulate
from weft.pipeline.text import answer_text, bytes_text, grid_text, timeline_text
from weft.pipeline.timeline import Timeline
from weft.pipeline.validation import validate

MOST_CELL = 64


def main(argv: list[str]) -> int:
    """Run ``weft schedule KIND --ranks P --microbatches M ...`` and return the exit code.

    Raises:
        ValueError: an option contradicts the others; the message names it and the remedy.
    """
    args = _parser().parse_args(argv)
    _check_numbers(args)
    require_output(args)
    if args.kind == "auto" and args.placement in (None, "any"):
        choice = _choose(args)
        schedule, costs = choice.best.schedule, choice.best.costs
    else:
        choice = None
        placement = place(args.kind, args.ranks, args.placement, args.sites, args.chunks)
        schedule, costs = _made(args, placement)
    schedule = as_run(schedule, costs)
    validate(schedule, costs=costs, memory_cap_bytes=args.memory_cap)
    if args.format in ("png", "perfetto"):
        draw(simulate(add_relays(lower(schedule), costs), costs), args.format, args.out)
    else:
        emit(_text(schedule, costs, args, choice), args.out)
    return 0


def _made(args: argparse.Namespace, placement: Placement) -> tuple[Schedule, CostModel]:
    """Return the schedule on one placement, and its costs."""
    cell = args.kind == "auto"
    alone = costs_of(args.costs, placement)
    costs = alone.for_cell(args.cell)
    schedule = generate(
        args.kind,
        replace(placement, pipelines=args.cell) if cell else placement,
        args.microbatches,
        costs=costs if cell else alone,
        memory_cap_bytes=args.memory_cap,
        search_seconds=args.search_seconds,
        launch_together=args.together,
        jitter_samples=args.jitter_samples,
    )
    return (schedule if cell else side_by_side(schedule, args.cell)), costs


def _choose(args: argparse.Namespace) -> Choice:
    """Run `auto` on every placement for which the costs can be cut."""
    chunks = args.chunks or 2
    pieces = load_pieces(args.costs) if args.costs else CostModel.unit(args.ranks * chunks)
    check_size(args.ranks * chunks * args.cell, args.microbatches)
    if args.together:
        raise ValueError(f"--together={args.together}: auto has no rounds; choose 0, or the interleaved schedule")
    return choose(
        placements(args.ranks, _checked_sites(args.sites, args.ranks), chunks),
        lambda placement: pieces.cut(placement.num_stages),
        args.microbatches,
        pipelines=args.cell,
        memory_cap_bytes=args.memory_cap,
        search_seconds=args.search_seconds,
        jitter_samples=args.jitter_samples,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers from which no schedule can be generated, by the name of the option."""
    count(args.ranks, "--ranks", most=MOST_RANKS)
    count(args.microbatches, "--microbatches")
    count(args.cell, "--cell", most=MOST_CELL)
    if args.chunks is not None:
        count(args.chunks, "--chunks", most=MOST_LEGS)
    count(args.together, "--together", least=0)
    number(args.search_seconds, "--search-seconds")
    count(args.jitter_samples, "--jitter-samples", least=0, most=MOST_JITTER_SAMPLES)
    if args.jitter_samples and args.kind != "auto":
        raise ValueError(f"--jitter-samples={args.jitter_samples}: {args.kind} depends on no costs; choose auto, or 0")
    if args.memory_cap is not None:
        number(args.memory_cap, "--memory-cap", above=0.0)
    if args.cell > 1 and args.format == "torch-csv":
        raise ValueError(f"--cell={args.cell}: torch's CSV knows one pipeline; choose --format json, or --cell 1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weft schedule", description="Generate a schedule; print, draw or export it.")
    parser.add_argument("kind", choices=list(generators()), help="kind of the schedule")
    parser.add_argument("--ranks", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches per step")
    parser.add_argument(
        "--placement",
        choices=("any", *LAYOUTS),
        help="default: the first that the kind supports; for auto `any`, which compares their step times",
    )
    parser.add_argument("--sites", type=_sizes, default=(), help="ranks per site, as in 4,4; default: one site")
    parser.add_argument("--cell", type=int, default=1, help="pipelines that share their uplinks (a DP-cell)")
    parser.add_argument("--chunks", type=int, help="virtual stages per rank; default: as the placement needs")
    parser.add_argument(
        "--costs",
        type=Path,
        help="YAML file with costs; default: F = I = W = 1 s and 1 byte per chunk (if placements are compared, a "
        "straight stage is two chunks). With costs of strands, only the strand pairs that gain time are kept",
    )
    parser.add_argument("--together", type=int, default=0, help="for interleaved: micro-batches in a row per chunk")
    parser.add_argument("--memory-cap", type=float, help="limit of the activations saved on any rank, in bytes")
    parser.add_argument(
        "--search-seconds", type=float, default=2.0, help="time limit of the search for auto; default 2"
    )
    parser.add_argument(
        "--jitter-samples",
        type=int,
        default=0,
        help="for auto: sampled steps, by the jitter in --costs, whose mean is minimized; default: plan by the medians",
    )
    parser.add_argument("--format", choices=("text", "json", "torch-csv", "png", "perfetto"), default="text")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    return parser


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected ranks per site, as in 4,4") from None


def place(kind: str, num_ranks: int, layout: str | None, sites: tuple[int, ...], chunks: int | None) -> Placement:
    """Return the placement of ``kind`` over ``num_ranks`` ranks.

    Args:
        layout: one of `LAYOUTS`; None or any takes the default of the kind.
        sites: ranks per site; empty is one site.
        chunks: virtual stages per rank; None takes the layout's number. Several chunks on a
            straight layout are interleaved.

    Raises:
        ValueError: the numbers contradict each other.
    """
    count(num_ranks, "--ranks", most=MOST_RANKS)
    sites = _checked_sites(sites, num_ranks)
    if chunks is not None:
        count(chunks, "--chunks", most=MOST_LEGS)
    if layout in (None, "any"):
        layout = generators()[kind].placements[0].name
    if layout == "straight" and (generators()[kind].goes_in_rounds or (chunks or 1) > 1):
        layout = "interleaved"
    assert layout is not None, "it is settled above"
    if layout.startswith("site_") and not sites:
        raise ValueError(
            f"--placement={layout}: it goes through one site after the other; give them, as in --sites 4,4"
        )
    return Placement.named(layout, num_ranks, sites, chunks or 2)


def _checked_sites(sites: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    if sites and (min(sites) < 1 or sum(sites) != num_ranks):
        raise ValueError(f"--sites={','.join(map(str, sites))}: they must be positive and sum to --ranks={num_ranks}")
    return sites


def costs_of(path: Path | None, placement: Placement) -> CostModel:
    """Return the costs in a file, or unit costs without one; for a DP-cell, the costs of the cell."""
    num_stages = placement.single.num_stages
    costs = load_costs(path, num_stages) if path else CostModel.unit(num_stages)
    return costs.for_cell(placement.pipelines) if placement.pipelines > 1 else costs


def _text(schedule: Schedule, costs: CostModel, args: argparse.Namespace, choice: Choice | None) -> str:
    if args.format == "json":
        return schedule_to_json(schedule)
    if args.format == "torch-csv":
        return schedule_to_csv(schedule)
    width = shutil.get_terminal_size().columns if args.out is None and sys.stdout.isatty() else None
    timeline = simulate(add_relays(lower(schedule), costs), costs)
    parts = [
        grid_text(schedule, width=width),
        timeline_text(timeline),
        answer_text(schedule, costs, timeline.step_s, args.memory_cap),
    ]
    if choice is not None:
        parts.append("\n".join(_choice_lines(choice, "mean step" if args.jitter_samples else "step")))
    return "\n\n".join(parts) + "\n"


def _choice_lines(choice: Choice, what: str) -> Iterator[str]:
    yield f"placement {choice.best.name}, by cost:"
    for option in choice.options:
        yield f"  {option.name:<17} {what} {option.step_s:.6g} s, holds {bytes_text(option.peak_bytes)}"
    for name, reason in choice.left_out.items():
        yield f"  {name:<17} {reason}"


def emit(text: str, out: Path | None) -> None:
    """Write ``text`` to a file, or print it."""
    if out is None:
        sys.stdout.write(text)
    else:
        write_atomic(out, text)


def draw(timeline: Timeline, form: str, out: Path) -> None:
    """Write a PNG or a Perfetto trace."""
    {"png": plot_timelines, "perfetto": write_perfetto}[form]([timeline], out)


def require_output(args: argparse.Namespace) -> None:
    """Check ``--format`` and ``--out`` before the work begins. Raise ValueError if the file cannot be written."""
    if args.out is not None:
        require_writable("--out", args.out)
    elif args.format in ("png", "perfetto"):
        raise ValueError(f"--format={args.format}: it writes a file; name it with --out")
