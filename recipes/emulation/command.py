"""`weft emulate`: measures the step of a large job with a few real ranks, and emulates all others."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from statistics import median

from weft.comm.emulated.operation_log import EmulationError, Mismatch
from weft.conf import load
from weft.conf.host.files import require_writable, write_atomic
from weft.conf.hosts import run_folder, world_size
from weft.pipeline.text import bytes_text
from weft.recipes.emulation.delays import delay_model
from weft.recipes.emulation.job import EmulatedJob, recipe_job
from weft.recipes.emulation.session import Setting
from weft.recipes.emulation.step import JobPace
from weft.recipes.emulation.turns import AGREED, Emulation, RealRank, emulate
from weft.recipes.emulation.twin import simulated_s
from weft.recipes.emulation.what_if import WhatIf
from weft.tools import parsers

_STEPS = 1
"""Number of measured steps over which `check_rank` compares a rank, after those that warm up."""


def main(argv: Sequence[str]) -> int:
    """Run ``[options] [recipe=NAME] [key=value ...]`` and return the exit code.

    Raises:
        ValueError: the input is invalid, or the delay model or a rank fails.
    """
    parser = parsers.emulate()
    args, overrides = parser.parse_known_args(argv)
    if args.at:
        unused = ("real", "most", "at_once", "steps", "record", "json")
        parsers.refuse_unused(parser, argv, unused, "--at compares messages and measures nothing; leave out one")
    if args.real != "auto":
        parsers.refuse_unused(parser, argv, ("most",), "--real names the ranks; leave out one")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for option, least in (("most", 1), ("steps", 1), ("at_once", 1), ("per_host", 1)):
        if getattr(args, option) < least:
            said = "at least one rank is real" if option == "most" else f"give at least {least}"
            raise EmulationError(f"--{option.replace('_', '-')} {getattr(args, option)}: {said}")
    for option, file in {"--record": args.record, "--json": args.json}.items():
        if file is not None:
            require_writable(option, file)
    delay_model(args.delays)
    real = _ranks(args.real)
    what_if = WhatIf.parse(args.what_if)
    config = load(overrides, recipe_file=args.config_file)
    folder = run_folder(config)
    if config.cluster.hostfile and not what_if.replicas:
        reason = f"cluster.hostfile={config.cluster.hostfile} has the ranks of each host; leave out one"
        parsers.refuse_unused(parser, argv, ("per_host",), reason)
    job = recipe_job(config, folder, what_if.replicas)
    size = world_size(job.config.cluster)
    what_if.check(size, job.config.pipeline.stages)
    setting = Setting(
        delays=args.delays, per_host=args.per_host, inside=args.inside, between=args.between, what_if=what_if
    )
    if args.at:
        rank, changed = _settings_at(args.at)
        if rank >= size:
            raise EmulationError(f"--at {rank}: there is no such rank; the job has ranks 0 to {size - 1}")
        other = recipe_job(load([*overrides, *changed], recipe_file=args.config_file), folder, what_if.replicas)
        check_rank(job, other, rank, size, setting, ", ".join(changed))
        print(f"rank {rank} with {', '.join(changed)}: all other ranks expect just what it does")
        return 0
    found = emulate(job, size, setting, steps=args.steps, most=args.most, real=real, at_once=args.at_once)
    print(report(found, setting))
    if args.record:
        seconds = {
            str(each.pipeline_rank): dict(turn.actions) for each, turn in zip(found.real, found.turns, strict=True)
        }
        write_atomic(args.record, json.dumps({"compute": seconds}) + "\n")
    if args.json:
        figures = {
            "step_s": found.step_s,
            "rounds_s": found.rounds,
            "real": {turn.rank: {"step_s": turn.step_s, "busy_s": turn.busy_s} for turn in found.turns},
            "twin_s": median(turn.twin_s for turn in found.turns),
        }
        write_atomic(args.json, json.dumps(figures, indent=1) + "\n")
    return 0


def check_rank(job: EmulatedJob, other: EmulatedJob, rank: int, size: int, setting: Setting, settings: str) -> None:
    """Run ``rank`` with the settings of all others, then with its own settings against the first run.

    Args:
        other: the job with the rank's own settings.
        settings: the differing settings, for the message.

    Raises:
        Mismatch: the rank does something that another rank does not expect. The message names both.
        ValueError: the rank itself rejects its settings.
    """
    with closing(RealRank(job, rank, size, setting)) as right:
        costs = right.ask("collectives", right.prepared.plan.costs)
        log = right.ask("run", _STEPS, costs, setting.what_if).log
    try:
        with closing(RealRank(other, rank, size, replace(setting, expected=log))) as wrong:
            wrong.ask("run", _STEPS, costs, setting.what_if)
    except Mismatch as error:
        raise Mismatch(f"{error}; rank {rank} was started with {settings}, the others were not") from None
    except EmulationError as error:
        raise EmulationError(f"{error}; rank {rank} was started with {settings}, the others were not") from None


def _ranks(text: str) -> list[int]:
    if text == "auto":
        return []
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise EmulationError(f"--real {text}: give auto, or global ranks such as 0,5,9") from None


def _settings_at(given: Sequence[str]) -> tuple[int, list[str]]:
    rank, *changed = given
    if not rank.isdigit() or not changed or not all("=" in setting for setting in changed):
        raise EmulationError(
            f"--at {' '.join(given)}: give a rank and its settings, as in --at 737 train.precision=fp32"
        )
    return int(rank), changed


def report(found: Emulation, setting: Setting) -> str:
    """Return a table of the real ranks' measurements, and the emulated and the simulated step."""
    layout, schedule = found.plan.layout, found.plan.schedule()
    lines = [
        f"{layout.world_size:,} ranks: {layout.stages} pipeline ranks x {layout.lines} lines at {len(layout.sites)} "
        f"sites, {schedule.name}, {schedule.num_microbatches} micro-batches; {len(found.classes)} classes of ranks, "
        f"{len(found.turns)} of them real",
        "",
        f"{'rank':>7} {'stages':>10} {'ranks alike':>11} {'step':>10} {'spread':>7} {'computes':>9} {'set-up':>7} "
        f"{'twin':>7} {'memory':>8} {'planned':>7}",
    ]
    for each, turn, set_up_s in zip(found.real, found.turns, found.set_up_s, strict=True):
        step_s = median(turn.step_s)
        spread = (max(turn.step_s) - min(turn.step_s)) / step_s
        lines.append(
            f"{turn.rank:>7} {'+'.join(map(str, each.stages)):>10} {len(each.ranks):>11,} {1e3 * step_s:>7.1f} ms "
            f"{spread:>6.1%} {turn.busy_s / step_s:>8.1%} {set_up_s:>5.1f} s {1e3 * turn.twin_s:>4.1f} ms "
            f"{bytes_text(turn.peak_bytes):>8} {turn.planned_bytes / turn.peak_bytes - 1:>+7.1%}"
        )
    rounds = ", ".join(f"{1e3 * step_s:.1f}" for step_s in found.rounds)
    lines += [
        "",
        f"step {1e3 * found.step_s:.1f} ms; round by round {rounds} ms: {found.change:.1%} in the last",
        *([] if found.agreed else [_disagreement(found)]),
        _beside_simulation(found, setting.what_if),
        "losses and gradient norms of this emulation mean nothing: emulated ranks send zeros",
    ]
    return "\n".join(lines)


def _disagreement(found: Emulation) -> str:
    """Return a warning about rounds whose steps differ, with advice."""
    turns = [median(turn.step_s) for turn in found.turns]
    return (
        f"the rounds do not agree to within {AGREED:.0%} (real ranks of the last: {1e3 * min(turns):.1f} to "
        f"{1e3 * max(turns):.1f} ms), so take the step as no more exact than that: let nothing else run on this "
        "machine, take --at-once 1, or measure more --steps"
    )


def _beside_simulation(found: Emulation, what_if: WhatIf) -> str:
    """Return a line with the simulator's step for the measured costs, and its difference from the emulated step."""
    plan = found.plan
    line = plan.layout.position(found.turns[0].rank).line
    costs = what_if.costs(found.costs).for_cell(plan.members[line].pipelines)
    predicted_s = simulated_s(plan.schedule(line), costs, JobPace(plan, line, None, what_if, 0))
    between_s = found.step_s - predicted_s
    return (
        f"simulated with the costs that were measured: {1e3 * predicted_s:.1f} ms; the {1e3 * between_s:+.1f} ms "
        "between are what a schedule has no slots for: reading data, agreeing on norm and loss"
    )
