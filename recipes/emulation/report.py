"""Text report of an emulation."""

from __future__ import annotations

from statistics import median

from weft.pipeline.cell import cell_step_s
from weft.pipeline.text import bytes_text
from weft.recipes.emulation.session import Setting
from weft.recipes.emulation.turns import AGREED, Emulation


def report(found: Emulation, setting: Setting) -> str:
    """Return a table of the real ranks' measurements, and the emulated and the simulated step."""
    layout, schedule = found.plan.layout, found.plan.schedule()
    lines = [
        f"{layout.world_size:,} ranks: {layout.stages} pipeline ranks x {layout.lines} lines at {len(layout.sites)} "
        f"sites, {schedule.name}, {schedule.num_microbatches} micro-batches; {len(found.classes)} classes of ranks, "
        f"{len(found.turns)} of them real",
        "",
        f"{'rank':>7} {'stages':>10} {'ranks alike':>11} {'step':>10} {'spread':>7} {'computes':>9} {'set-up':>7} "
        f"{'twin':>7} {'memory':>8}",
    ]
    for each, turn, set_up_s in zip(found.real, found.turns, found.set_up_s, strict=True):
        step_s = median(turn.step_s)
        spread = (max(turn.step_s) - min(turn.step_s)) / step_s
        lines.append(
            f"{turn.rank:>7} {'+'.join(map(str, each.stages)):>10} {len(each.ranks):>11,} {1e3 * step_s:>7.1f} ms "
            f"{spread:>6.1%} {turn.busy_s / step_s:>8.1%} {set_up_s:>5.1f} s {1e3 * turn.twin_s:>4.1f} ms "
            f"{bytes_text(turn.memory_bytes):>8}"
        )
    rounds = ", ".join(f"{1e3 * step_s:.1f}" for step_s in found.rounds)
    lines += [
        "",
        f"step {1e3 * found.step_s:.1f} ms; round by round {rounds} ms: {found.change:.1%} in the last",
        *([] if found.agreed else [_disagreement(found)]),
        _beside_simulation(found, setting),
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


def _beside_simulation(found: Emulation, setting: Setting) -> str:
    """Return a line with the simulator's step for the measured costs, and its difference from the emulated step."""
    costs = setting.what_if.costs(found.costs)
    simulated_s = cell_step_s(found.plan.schedule(), costs)
    between_s = found.step_s - simulated_s
    return (
        f"simulated with the costs that were measured: {1e3 * simulated_s:.1f} ms; the {1e3 * between_s:+.1f} ms "
        "between are what a schedule has no slots for: reading data, agreeing on norm and loss"
    )
