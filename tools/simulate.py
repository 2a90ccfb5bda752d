"""`weft simulate`: time a schedule from a file without running it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from weft.conf.features import entry, is_installed, require
from weft.pipeline.cell import add_relays
from weft.pipeline.jitter import has_jitter
from weft.pipeline.lowering import lower
from weft.pipeline.serialization import load_schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.text import jitter_text, timeline_text
from weft.pipeline.timeline import Timeline
from weft.pipeline.validation import validate
from weft.tools.parsers import refuse_unused
from weft.tools.schedule import costs_of, draw, emit, require_output


def main(argv: list[str]) -> int:
    """Run ``weft simulate SCHEDULE [--costs FILE]`` and return the exit code.

    Raises:
        ValueError: a file cannot be read, or the schedule cannot run; the message names the place.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.prefill:
        refuse_unused(parser, argv, ("format", "out"), "with --prefill a table is printed; leave it out")
    else:
        prefill = set(vars(args)) - {"schedule", "costs", "format", "out", "prefill"}
        refuse_unused(parser, argv, sorted(prefill), "only --prefill TRACE.csv uses it; give both, or leave it out")
    require_output(args)
    schedule = load_schedule(args.schedule)
    validate(schedule)
    costs = costs_of(args.costs, schedule.placement)
    schedule = add_relays(lower(schedule), costs)
    validate(schedule)
    if args.prefill:
        require("prefill", f"--prefill={args.prefill}")
        entry("prefill").simulate_prefills(schedule, costs, args)
        return 0
    timeline = simulate(schedule, costs)
    jitter = f"with jitter: {jitter_text(schedule, costs)}\n" if has_jitter(costs) else ""
    if args.format in ("png", "perfetto"):
        draw(timeline, args.format, args.out)
    else:
        emit(f"{timeline_text(timeline)}\n{jitter}" if args.format == "text" else _json(timeline), args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft simulate", description="Predict the step time of a schedule without running it."
    )
    parser.add_argument("schedule", type=Path, help="file with the schedule: Weft's JSON, or torch's compute-only CSV")
    parser.add_argument("--costs", type=Path, help="YAML file with costs; default: F = I = W = 1 s, 1 byte a chunk")
    parser.add_argument("--format", choices=("text", "json", "png", "perfetto"), default="text")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    parser.add_argument(
        "--prefill",
        type=Path,
        metavar="TRACE.csv",
        help="replay prompts in the bubbles, with the columns TIMESTAMP and ContextTokens",
    )
    if is_installed("prefill"):
        entry("prefill").add_simulation_options(parser)
    return parser


def _json(timeline: Timeline) -> str:
    summary = {
        "name": timeline.name,
        "step_s": timeline.step_s,
        "bubble_share": timeline.bubble_share,
        "busy_s": timeline.busy_s,
        "peak_bytes": timeline.peak_bytes,
        "live_microbatches": timeline.live_microbatches,
    }
    return json.dumps(summary, indent=2) + "\n"
