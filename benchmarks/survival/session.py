"""Faults of one run, one after the other; each outcome is compared with an undisturbed run at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from benchmarks.survival.faults import (
    DISK,
    DISK_MIB,
    ENDLESS_NAN,
    HOSTS_AND_WATCHERS,
    NUMBERS,
    ONE_RANK,
    STORAGE,
    Fault,
    Inflicted,
)
from benchmarks.survival.hosts import NUM_RANKS, BedHosts, LocalHosts, OneMachine
from benchmarks.survival.network import AWAY, LINES, WAITS
from benchmarks.survival.outcome import Survival, is_right
from benchmarks.survival.reference import Undisturbed, difference
from benchmarks.survival.run import SupervisedRun

USUAL_STEPS = 8
"""Steps between two faults."""
_AHEAD_STEPS = 100
_FIRST_STEPS_S = 300.0
_END_S = 300.0
_LONG_S = 240.0
"""Seconds for hosts that come back: they are tried twice a minute, and a checkpoint has to be saved."""


@dataclass(frozen=True)
class Session:
    """A sequence of faults in one run.

    Attributes:
        settings: settings of the run, in addition to those of all runs.
        hosts: creates its hosts in a folder.
        stages: number of pipeline stages, of 8 ranks.
        disk_mib: size of a new file system for the run's folder; 0 uses the existing one.
    """

    faults: Sequence[Fault]
    settings: tuple[str, ...] = ()
    hosts: Callable[[Path], OneMachine] = LocalHosts
    stages: int = 4
    disk_mib: int = 0


_SOON = ("checkpoint.every=20",)
SESSIONS = (
    Session(ONE_RANK),
    Session(HOSTS_AND_WATCHERS),
    Session(STORAGE),
    Session(NUMBERS),
    Session(ENDLESS_NAN),
    Session(DISK, _SOON, disk_mib=DISK_MIB),
    Session(LINES, _SOON, BedHosts),
    Session(AWAY, _SOON, BedHosts),
    Session(
        WAITS,
        (*_SOON, "pipeline.stages=8", "pipeline.microbatches=8", "model.overrides.num_hidden_layers=8"),
        BedHosts,
        8,
    ),
)
"""Faults by run: a fault that changes losses or ends the run has its own."""


class Outcomes:
    """Runs sessions, and compares the losses after each fault with those of an undisturbed run."""

    def __init__(self, folder: Path, settings: Sequence[str], tell: Callable[[Survival], None]) -> None:
        self._folder, self._settings, self._tell = folder, settings, tell
        self._undisturbed: dict[object, Undisturbed] = {}
        self._numbers = 0

    def close(self) -> None:
        """End the undisturbed runs."""
        for each in self._undisturbed.values():
            each.close()

    def run(self, session: Session, faults: Sequence[Fault]) -> None:
        """Inflict the faults of a session, each after training has continued from the previous one."""
        folder = Path(self._folder, f"session{self._numbers}")
        self._numbers += 1
        rounds = False
        self._reference(session, None).losses(_AHEAD_STEPS)  # while no run takes the processor from it
        with running(folder, [*self._settings, *session.settings], session.hosts, session.disk_mib) as run:
            try:
                run.wait_for(lambda: run.step > USUAL_STEPS, "the first steps", timeout_s=_FIRST_STEPS_S)
            except RuntimeError as error:
                for fault in faults:
                    self._tell(Survival(fault.name, note=str(error).splitlines()[0]))
                print(error, file=sys.stderr)
                return
            for fault in faults:
                rounds = rounds or fault.rounds
                outcome = Survival(fault.name, rounds=rounds, ends=bool(fault.ends))
                before = run.step
                try:
                    inflict(run, fault, outcome)
                except RuntimeError as error:
                    outcome.note = str(error).splitlines()[0]
                    print(error, file=sys.stderr)
                failed = bool(outcome.note)
                self._compare(session, fault, outcome, run, before)
                self._tell(outcome)
                if failed or run.events("end"):
                    break

    def _compare(self, session: Session, fault: Fault, outcome: Survival, run: SupervisedRun, before: int) -> None:
        """Compare the losses since the fault with an undisturbed run, which is continued to the same step."""
        found = {step: loss for step, loss in run.losses().items() if step >= before}
        poisoned = run.orders / "poisoned"
        skipped = int(poisoned.read_text()) if poisoned.exists() else 0
        if fault.ends:
            found = {step: loss for step, loss in found.items() if step <= skipped}
        left_out = None
        if fault.skips:
            left_out = (skipped - 1) * run.batch_size, skipped * run.batch_size
        try:
            outcome.difference = difference(found, self._expected(session, max(found, default=0), left_out, skipped))
        except (RuntimeError, KeyError) as error:
            outcome.note = outcome.note or f"losses: {str(error).splitlines()[0]}"

    def _expected(
        self, session: Session, until: int, left_out: tuple[int, int] | None, skipped: int
    ) -> Mapping[int, float]:
        """Return the losses of an undisturbed run, or of one that leaves out the sequences of a skipped step."""
        usual = self._reference(session, None).losses(until)
        if left_out is None:
            return usual
        less = self._reference(session, left_out).losses(until)
        return {step: usual[step] if step <= skipped else less[step - 1] for step in usual if step - 1 in (0, *less)}

    def _reference(self, session: Session, left_out: tuple[int, int] | None) -> Undisturbed:
        key = session.settings, left_out
        if key not in self._undisturbed:
            folder = Path(self._folder, f"undisturbed{len(self._undisturbed)}")
            settings = [*self._settings, *session.settings]
            self._undisturbed[key] = Undisturbed(folder, settings, stages=session.stages, left_out=left_out)
        return self._undisturbed[key]


def inflict(run: SupervisedRun, fault: Fault, outcome: Survival) -> None:
    """Cause the fault, and record its outcome until a few usual steps have followed.

    Raises:
        RuntimeError: an expected event did not happen in time.
    """
    before, looked_s = run.step, Inflicted().at_s
    done = fault.inflict(run)
    if fault.ends:
        _see_end(run, fault, done, outcome)
        return
    if fault.grows and run.num_ranks() == NUM_RANKS:
        outcome.culprit, outcome.right = "nobody had been left out", True
    elif fault.grows:
        run.wait_for(lambda: _grown(run, done.at_s), "more ranks", timeout_s=_LONG_S)
        outcome.next_step_s = _grown(run, done.at_s) - done.at_s
        outcome.culprit, outcome.right = "nobody", True
    elif done.blamed is None:
        _see_no_restart(run, fault, done, looked_s, before, outcome)
    else:
        reached = _see_restart(run, done, looked_s, outcome)
        before = max(before, reached)
    run.wait_for_step(max(run.step, before) + USUAL_STEPS, timeout_s=_LONG_S)
    if late := run.events("fault", since=looked_s)[done.blamed is not None :]:  # besides the one that was inflicted
        outcome.right, outcome.culprit = False, f"{outcome.culprit}; then {_text(late[0])}"


def _see_end(run: SupervisedRun, fault: Fault, done: Inflicted, outcome: Survival) -> None:
    """Expect the run to end, with a report of the right kind of fault."""
    try:
        run.process.wait(timeout=_END_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the run has not ended after {_END_S:g} s") from error
    (end,) = run.events("end")
    faults = run.events("fault")
    outcome.culprit = f"{faults[-1]['kind'] if faults else 'nothing'}: {end['reason'][:60]}"
    outcome.named_s = end["at"] - done.at_s
    outcome.right = end["code"] != 0 and bool(faults) and faults[-1]["kind"] == fault.ends


def _see_no_restart(
    run: SupervisedRun, fault: Fault, done: Inflicted, since_s: float, before: int, outcome: Survival
) -> None:
    """Expect no culprit and no restart, and an alert if the fault has one."""
    run.wait_for_step(run.step + 1)
    longest_s = max(seconds for step, seconds in run.step_seconds().items() if step > before)
    outcome.next_step_s = max(0.0, Inflicted().at_s - done.healed_s) if done.healed_s else longest_s
    named = run.events("fault", since=since_s)
    alerts = [event for event in run.events("alert", since=since_s) if event["kind"] == fault.alert]
    outcome.right = not named and bool(alerts) == bool(fault.alert)
    outcome.named_s = max(0.0, alerts[0]["at"] - done.at_s) if alerts else None
    outcome.culprit = _text(named[0]) if named else f"alert: {alerts[0]['kind']}" if alerts else "nobody"
    outcome.lost = 0 if not named else None


def _see_restart(run: SupervisedRun, done: Inflicted, looked_s: float, outcome: Survival) -> int:
    """Expect a culprit and a restart; return the last step that had ended before training went back."""
    assert done.blamed is not None
    (named, *_) = run.wait_for(lambda: run.events("fault", since=looked_s), "a culprit")
    reached = run.step
    first = run.events("attempt")[0]
    outcome.right = is_right(
        {**(named.get("culprit") or {}), "kind": named["kind"]},
        done.blamed,
        {int(rank): host for rank, host in first["ranks"].items()},
    )
    outcome.culprit = _text(named)
    told = [event["at"] for event in run.events("alert", since=looked_s) if _tells(event, done.blamed)]
    outcome.named_s = max(0.0, min([named["at"], *told]) - done.at_s)
    since_s = max(named["at"], done.healed_s)
    (good, *_) = run.wait_for(lambda: run.events("good_step", since=since_s), "the next good step", timeout_s=_LONG_S)
    outcome.next_step_s = good["at"] - max(done.at_s, done.healed_s)
    outcome.lost = max(0, reached - good["step"] + 1)
    return reached


def _tells(alert: Mapping, blamed: Mapping) -> bool:
    """Return True if an alert names the site or the line before a fault is declared; links have time to recover."""
    site = blamed.get("site") or blamed.get("between", ("", "-"))[1]
    hosts = alert["culprit"].get("hosts", ())
    return bool(hosts) and all(host.startswith(site) for host in hosts)


def _grown(run: SupervisedRun, since_s: float) -> float:
    """Return when every rank had completed a step after hosts returned, or 0 before."""
    grown = [event for event in run.events("attempt", since=since_s) if event["reason"] == "grow"]
    good = run.events("good_step", since=grown[0]["at"]) if grown else []
    return good[0]["at"] if good else 0.0


def _text(event: Mapping) -> str:
    said = ", ".join(f"{name} {value}" for name, value in (event.get("culprit") or {}).items())
    return f"{said} ({event['kind']})" if said else str(event["kind"])


@contextmanager
def running(
    folder: Path, settings: Sequence[str], hosts: Callable[[Path], OneMachine] = LocalHosts, disk_mib: int = 0
) -> Iterator[SupervisedRun]:
    """Run in ``folder`` until the block ends."""
    folder.mkdir(parents=True)
    disk = folder / "survive"
    if disk_mib:
        disk.mkdir(mode=0o700)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m,mode=700", "tmpfs", str(disk)], check=True)
    run = SupervisedRun(folder, settings, hosts(folder))
    try:
        yield run
    finally:
        run.close()
        sleep(0.5)
        if disk_mib:
            subprocess.run(["umount", str(disk)], check=False)
