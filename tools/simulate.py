"""`weft simulate`: time a schedule from a file without running it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from weft.inference.placement.prompt_work import PromptWork
from weft.pipeline.cell import add_relays
from weft.pipeline.lowering import lower
from weft.pipeline.serialization import load_schedule
from weft.pipeline.simulation import simulate
from weft.pipeline.text import timeline_text
from weft.pipeline.timeline import Timeline
from weft.pipeline.validation import validate
from weft.tools.schedule import costs_of, draw, emit


def main(argv: list[str]) -> int:
    """Run ``weft simulate SCHEDULE [--costs FILE]`` and return the exit code.

    Raises:
        ValueError: a file cannot be read, or the schedule cannot run; names the place.
    """
    args = _parser().parse_args(argv)
    schedule = load_schedule(args.schedule)
    validate(schedule)
    costs = costs_of(args.costs, schedule.placement)
    schedule = add_relays(lower(schedule), costs)
    validate(schedule)
    if args.prefill:
        from weft.tools.simulate_prefill import report  # needs numpy, which takes a while to load

        report(schedule, costs, args)
        return 0
    timeline = simulate(schedule, costs)
    if args.format in ("png", "perfetto"):
        draw(timeline, args.format, args.out)
    else:
        emit(f"{timeline_text(timeline)}\n" if args.format == "text" else _json(timeline), args.out)
    return 0


def _prefill_cost(text: str) -> PromptWork:
    """The option's value: STEP_MS,TOKEN_US,PAIR_NS of a chunk of n tokens after c."""
    try:
        step_ms, token_us, pair_ns = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected STEP_MS,TOKEN_US,PAIR_NS, as in 5,107,3.5") from None
    return PromptWork(step_s=step_ms / 1e3, token_s=token_us / 1e6, context_s=pair_ns / 1e9, max_tokens=8192)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft simulate", description="Predict the step time of a schedule without running it."
    )
    parser.add_argument("schedule", type=Path, help="file with the schedule: Weft's JSON, or torch's compute-only CSV")
    parser.add_argument("--costs", type=Path, help="YAML file with costs; default: F = I = W = 1 s, 1 byte a chunk")
    parser.add_argument("--format", choices=("text", "json", "png", "perfetto"), default="text")
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    prefill = parser.add_argument_group("prefills in the bubbles (with --prefill)")
    prefill.add_argument(
        "--prefill", type=Path, metavar="TRACE.csv", help="prompts, with the columns TIMESTAMP and ContextTokens"
    )
    prefill.add_argument("--gpus", type=int, default=1000, help="number of GPUs that train; default 1000")
    prefill.add_argument("--cells", type=int, default=50, help="number of DP-cells that the GPUs form; default 50")
    prefill.add_argument(
        "--prefill-cost",
        type=_prefill_cost,
        default="5,107,3.5",
        metavar="STEP_MS,TOKEN_US,PAIR_NS",
        help="cost of a chunk: per engine step, per token, per pair of tokens; default: 8 B parameters on an A100",
    )
    prefill.add_argument(
        "--guard", type=float, default=2.0, metavar="MS", help="time kept free at the end of each bubble; default 2"
    )
    prefill.add_argument(
        "--deadline",
        type=float,
        default=10.0,
        metavar="S",
        help="longest acceptable time to the first token; default 10",
    )
    prefill.add_argument(
        "--loads",
        type=float,
        nargs="*",
        default=[0.5, 0.8, 0.95, 1.2],
        help="offered loads, as fractions of the bubbles' capacity",
    )
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
