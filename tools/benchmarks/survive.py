"""`weft bench survive`: faults in supervised runs: who is blamed, when training goes on, and what is lost."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from weft.tools.benchmarks.results import parse, write_json
from weft.tools.benchmarks.survival.faults import SESSIONS, Fault
from weft.tools.benchmarks.survival.run import SupervisedRun, now
from weft.tools.tables import show, table_of

SETTINGS = (
    "recipe=quickstart",
    "cluster=two_sites",
    "cluster.master_port=29517",
    "cluster.sites=[{name: east, hosts: [east0, east1]}, {name: west, hosts: [west0, west1]}]",
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
    "supervise.enabled=true",
    "supervise.compare_every=5",
)
_USUAL_STEPS = 8
_NAMED_WITHIN_S = 10.0
_NEXT_STEP_WITHIN_S = 30.0


@dataclass
class Survival:
    """What became of a fault.

    Attributes:
        culprit: as the journal has it, and whether it is right.
        named_s: until it was named.
        next_step_s: until the first good step after.
        lost: steps that were trained again.
        same: whether every loss from the fault to the next one is that of an undisturbed run.
        first_step: the last that had ended before the fault.
        reached: the last that ended before the run went back.
        note: what went wrong otherwise.
    """

    fault: str
    culprit: str = "-"
    right: bool = False
    named_s: float | None = None
    next_step_s: float | None = None
    lost: int | None = None
    same: bool | None = None
    first_step: int = 0
    reached: int = 0
    note: str = ""


def main(argv: Sequence[str]) -> int:
    """Run ``weft bench survive [--only TEXT ...] [key=value ...]``; returns 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="weft bench survive", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="only faults whose name contains one")
    parser.add_argument("--folder", type=Path, help="leave the runs there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of `weft launch`")
    args = parse(parser, argv)
    settings = [*SETTINGS, *args.overrides]
    found: list[Survival] = []
    losses: list[dict[int, float]] = []
    with tempfile.TemporaryDirectory(prefix="weft-survive-") as temporary:
        folder = args.folder or temporary
        for number, faults in enumerate(SESSIONS):
            chosen = [fault for fault in faults if any(text in fault.name for text in args.only)]
            if chosen:
                outcomes, seen = _session(Path(folder, f"session{number}"), settings, chosen)
                found += outcomes
                losses += [seen] * len(outcomes)
        last = max((max(seen, default=0) for seen in losses), default=0)
        usual = _undisturbed(Path(folder, "undisturbed"), settings, last)
    for outcome, seen in zip(found, losses, strict=True):
        later = [other.first_step for other in found if other.first_step > outcome.first_step and seen]
        until = min(later, default=last)
        compared = {step: loss for step, loss in seen.items() if outcome.first_step <= step < until}
        outcome.same = bool(compared) and all(usual.get(step) == loss for step, loss in compared.items())
    table = table_of(map(_row, found), "8 ranks, 2 sites x 2 stages x 2 replicas, 4 hosts", left=2)
    show(table)
    met = all(map(_is_met, found))
    goals = f"named within {_NAMED_WITHIN_S:g} s, next step within {_NEXT_STEP_WITHIN_S:g} s, losses equal"
    print(f"{goals}: {'met' if met else 'MISSED'}")
    write_json(args, "survive", table, met=met)
    return 0 if met else 1


def _session(folder: Path, settings: Sequence[str], faults: Sequence[Fault]) -> tuple[list[Survival], dict[int, float]]:
    """Faults one after the other, each once steps come again; what became of them, and all losses."""
    outcomes = []
    with _running(folder, settings) as run:
        run.wait_for(lambda: run.step > _USUAL_STEPS, "the first steps", timeout_s=300.0)
        for fault in faults:
            outcome = Survival(fault.name)
            outcomes.append(outcome)
            try:
                _inflict(run, fault, outcome)
                if not fault.ends:
                    run.wait_for_step(max(run.step, outcome.reached) + _USUAL_STEPS)
            except RuntimeError as error:
                outcome.note = str(error).splitlines()[0]
                print(error, file=sys.stderr)
            print(outcome, file=sys.stderr, flush=True)
            if run.events("end"):
                break
        return outcomes, run.losses()


def _inflict(run: SupervisedRun, fault: Fault, outcome: Survival) -> None:
    before_s, outcome.first_step = now(), run.step
    blamed = fault.inflict(run)
    after_s = now()  # some faults wait for the right moment
    if fault.ends:
        run.process.wait(timeout=180)
        (end,) = run.events("end")
        outcome.culprit, outcome.named_s, outcome.right = end["reason"][:60], end["at"] - before_s, end["code"] != 0
        return
    if blamed is None:
        named = run.events("fault", since=before_s)
        alerts = [event for event in run.events("alert", since=before_s) if event["kind"] == fault.alert]
        outcome.right = not named and bool(alerts) == bool(fault.alert)
        outcome.culprit = str(named[0].get("culprit")) if named else alerts[0]["kind"] if alerts else "nobody"
        outcome.lost = 0
        return
    (named, *_) = run.wait_for(lambda: run.events("fault", since=before_s), "a culprit")
    outcome.reached = max(run.step, outcome.first_step)
    outcome.named_s = max(0.0, named["at"] - after_s)
    said = named.get("culprit") or {}
    outcome.right = all(said.get(name) == value for name, value in blamed.items())
    outcome.culprit = ", ".join(f"{name} {value}" for name, value in said.items()) or named["kind"]
    (good, *_) = run.wait_for(lambda: run.events("good_step", since=named["at"]), "the next good step")
    outcome.next_step_s = good["at"] - after_s
    outcome.lost = max(0, outcome.reached - good["step"] + 1)


def _undisturbed(folder: Path, settings: Sequence[str], steps: int) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    plain = ["supervise.enabled=false", "checkpoint.every=0", "checkpoint.memory_every=0", "cluster.ranks=8"]
    sites = "cluster.sites=[{name: east, ranks: 2}, {name: west, ranks: 2}]"
    with _running(folder, [*settings, *plain, sites], hosts=False) as run:
        run.wait_for(lambda: run.step >= steps, f"{steps} undisturbed steps", timeout_s=300.0 + 5.0 * steps)
        return run.losses()


@contextmanager
def _running(folder: Path, settings: Sequence[str], *, hosts: bool = True) -> Iterator[SupervisedRun]:
    run = SupervisedRun(folder, settings, hosts=hosts)
    try:
        yield run
    finally:
        run.close()
        sleep(0.5)


def _is_met(each: Survival) -> bool:
    in_time = (each.named_s or 0.0) <= _NAMED_WITHIN_S and (each.next_step_s or 0.0) <= _NEXT_STEP_WITHIN_S
    return each.right and bool(each.same) and in_time and not each.note


def _row(each: Survival) -> dict[str, object]:
    return {
        "fault": each.fault,
        "blamed": each.note or each.culprit,
        "right": _word(each.right),
        "named after s": _seconds(each.named_s),
        "next step after s": _seconds(each.next_step_s),
        "steps lost": "-" if each.lost is None else each.lost,
        "losses equal": _word(each.same),
    }


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
