"""Which ranks deviate from their class, steadily or in pauses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.tools.watch.deviations import (
    HIGH,
    LEAST_DEVIATION,
    LOW,
    against_peers,
    deviation,
    is_steady,
    least_share,
    logs,
    lower_median,
    quantiles,
)
from weft.tools.watch.record import COMPUTE_SECTIONS, RunRecord
from weft.tools.watch.step_files import INSIDE, Seconds

LABELS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "SEND_F": "send activations",
    "SEND_B": "send gradients",
    "RECV_F": "wait for activations",
    "RECV_B": "wait for gradients",
    "REDUCE_GRAD": "start reductions",
    "UNSHARD": "gather weights",
    "STEP": "optimiser",
    "data": "read data",
    "gradients": "wait for reductions",
    "weights": "wait for weights",
    "sums": "wait for small sums",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "step": "whole step",
}
"""Sections in words, in the order of the heat map."""
WARM_UP = 2
"""First steps of a run, which are left out: memory is allocated and kernels are loaded."""
WINDOW = 20
"""Steps after which a deviation is judged."""
OWN = ("compute", "data", "SEND_F", "SEND_B")
"""Work of a rank itself. The rest are waits, which others cause."""
PAUSED = (*OWN, "REDUCE_GRAD")
"""Sections whose pauses are reported. If a rank starts a reduction late, its peers wait for it."""
READ = (*COMPUTE_SECTIONS, INSIDE, *PAUSED[1:], "step")
"""Sections from which `PAUSED` is summed."""
WINDOWS = (WINDOW, 40, 80)
"""Numbers of steps over which ranks are compared. The first that shows a deviation counts."""
MOST_VALUES = 3000
"""Most steps times ranks of a window that is longer than the first, so that a long run needs no more memory to show."""
LEAST_SHARE = 0.01
"""Share of a step below which a deviation has no effect worth a name."""
LEAST_SIGMAS = 5.0
"""Deviations, in standard errors, that chance explains in one of 100,000 windows of 20 steps (measured; the error, too,
is estimated from the window)."""
LEAST_PAUSE_SIGMAS = 6.0
LEAST_PAUSES = 3
LEAST_PAUSE = 0.02
"""Share of a step below which a longer section is no pause."""
MOST_ALIKE = 0.85
"""Share of the steps that one step divides into usual and slower ones, from which a rank has become slower for good."""
SIGMA_BELOW = 1.95
"""Standard deviation of one step, in units of the distance between the quantiles LOW - 0.15 and LOW."""
MOST_RANKS = 0.9
"""Share of the ranks whose spread the assumed one is not below."""
MOST_NAMED = 8


def _own_work(record: RunRecord, found: Seconds) -> Seconds:
    """Return the seconds of `PAUSED` and of the whole step, by step and rank.

    Computations count as if all replicas had read equally many micro-batches. Waits inside of them, as for weights at
    ZeRO stage 3, are no work: ranks wait there for a slow one.
    """
    compute = sum(found.seconds[..., found.sections.index(name)] for name in COMPUTE_SECTIONS)
    compute -= found.seconds[..., found.sections.index(INSIDE)]
    compute *= record.equal_shares(found.ranks, found.first, len(compute))
    others = [found.seconds[..., found.sections.index(name)] for name in (*PAUSED[1:], "step")]
    return found._replace(sections=(*PAUSED, "step"), seconds=np.stack([compute, *others], axis=-1))


@dataclass(frozen=True)
class Deviation:
    """A section of a rank that is slower than its class.

    Attributes:
        share: by how much it is slower, as a share of its class's time.
        lost_s: seconds of a step that this costs the rank.
    """

    rank: int
    section: str
    share: float
    lost_s: float
    reference: str

    def text(self, record: RunRecord) -> str:
        """Describe the deviation in words."""
        place, what = record.places[self.rank], LABELS.get(self.section, self.section)
        where = f"rank {self.rank} (stage {place.stage}, pipeline {place.line})"
        return f"{where}: {what} takes {self.share:.0%} longer than {self.reference}, {self.lost_s * 1e3:.1f} ms a step"


class Window:
    """Own work of all ranks over some steps, and how they compare with their classes in it."""

    def __init__(self, record: RunRecord, seconds: Seconds) -> None:
        self._record, self.own = record, _own_work(record, seconds)
        self._ratios: dict[str, np.ndarray] = {}

    @property
    def num_recorded(self) -> int:
        """Number of steps with any event."""
        return int(self.own.is_recorded.any(axis=1).sum())

    @property
    def step_s(self) -> float:
        """The median of the ranks' whole steps in seconds."""
        return float(np.nanmedian(self.own.of("step")))

    def _classes(self, usual: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the indices of each class's ranks that have a value."""
        for group in self._record.classes:
            places = np.searchsorted(self.own.ranks, group)
            yield places[~np.isnan(usual[places])]

    def _against_peers(self, section: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the usual seconds of ranks, and `against_peers` by step and rank, NaN for ranks without peers."""
        seconds = self.own.of(section)
        usual = quantiles(seconds, (LOW,))[0]
        if section not in self._ratios:
            ratios = self._ratios[section] = np.full(seconds.shape, np.nan)
            for places in self._classes(usual):
                if len(places) > 1:
                    ratios[:, places] = against_peers(seconds[:, places])
        return usual, self._ratios[section]

    @cached_property
    def deviations(self) -> list[Deviation]:
        """The ranks that are slower than their class in most steps."""
        return [each for section in OWN for each in self._deviations(section)]

    def _deviations(self, section: str) -> Iterator[Deviation]:
        usual, ratios = self._against_peers(section)
        ratios, expected = ratios.copy(), np.zeros(len(usual))
        middle, names = np.full(len(usual), 0.5), dict[int, str]()
        for places in self._classes(usual):
            if len(places) > 1:
                expected[places] = lower_median(usual[places])
                names |= dict.fromkeys(places.tolist(), f"its class of {len(places)} ranks")
            elif len(places):
                place = int(places[0])
                expected[place], names[place] = self._alone(usual, place, section)
                ratios[:, place] = logs(self.own.of(section)[:, place]) - logs(expected[place])
                middle[place] = LOW
        share, error = deviation(ratios, middle)
        is_slow = np.nan_to_num(share) > np.maximum(LEAST_DEVIATION, np.expm1(LEAST_SIGMAS * error))
        is_slow &= np.nan_to_num(share) * expected > LEAST_SHARE * self.step_s
        for at in np.flatnonzero(is_slow).tolist():
            if is_steady(ratios[:, at], float(share[at]), float(error[at])):
                lost_s = float(share[at] * expected[at])
                yield Deviation(int(self.own.ranks[at]), section, float(share[at]), lost_s, names[at])

    def _alone(self, usual: np.ndarray, place: int, section: str) -> tuple[float, str]:
        """Return the expected seconds of a section of a rank without peers, or 0, and their origin in words."""
        record, is_known = self._record, ~np.isnan(usual)
        if section == "compute" and record.config["pipeline"].get("costs_file") and is_known.sum() > 2:
            stands = [record.places[each] for each in self.own.ranks.tolist()]
            planned = np.array([record.predictions[one.line].busy_s[one.stage] for one in stands])
            pace = float(np.median(usual[is_known] / planned[is_known]))
            return pace * float(planned[place]), "its costs, at the pace of the other ranks"
        if (begun := self._begun) is None:
            return 0.0, ""
        own = begun.of(section)[:, place]
        if np.isnan(own).all():
            return 0.0, ""
        return float(np.nanquantile(own, LOW)), f"in steps {begun.first} to {begun.first + len(own) - 1}"

    @cached_property
    def _begun(self) -> Seconds | None:
        """Own work in the run's first steps after the warm-up and before this window, or None if they are few."""
        first = self._record.step_range[0] + WARM_UP
        last = min(self.own.first, first + WINDOW) - 1
        if last - first + 1 < WINDOW // 2:
            return None
        return _own_work(self._record, self._record.steps.window(first, last, READ))

    def often_slower(self, section: str) -> np.ndarray:
        """Return the seconds by which ranks are slower than their class in many steps, or infinity.

        A single step has to exceed the usual by more than its own noise explains. The quantile HIGH of a window has
        less.
        """
        usual, ratios = self._against_peers(section)
        found = np.full(len(usual), np.inf)
        share, spread, expected = (np.full(len(usual), np.nan) for _ in range(3))
        for places in self._classes(usual):
            if len(places) > 1:
                below, often, above = quantiles(ratios[:, places], (HIGH - 0.15, HIGH, HIGH + 0.15))
                share[places], spread[places] = np.expm1(often - lower_median(often)), above - below
                expected[places] = lower_median(usual[places])
        if np.isfinite(spread).any():
            least = least_share(np.nanmedian(spread), (~np.isnan(self.own.of(section))).sum(axis=0))
            is_often = np.nan_to_num(share) > least
            found[is_often] = (share * expected)[is_often]
        return found


def window_until(record: RunRecord, last: int | None = None, steps: int = WINDOW) -> Window:
    """Return the window of ``steps`` steps that ends with ``last``, or with the newest, after the warm-up."""
    begun, newest = record.step_range
    last = newest if last is None else last
    return Window(record, record.steps.window(max(begun + WARM_UP, last - steps + 1), last, READ))


def outliers(record: RunRecord, last: int | None = None, recent: Window | None = None) -> list[Deviation]:
    """Return the ranks that are slower than their class over a window of steps, the worst first.

    Ranks of a class are compared within each step, because other programs of a host slow all its ranks at once. A
    small deviation needs the longer ones of `WINDOWS`. A rank without peers is compared with its own first steps, or,
    where a file has measured costs (``pipeline.costs_file``), with the other ranks by these costs.

    Args:
        last: last step of the window. None means the newest.
        recent: the newest window, if it has been read.
    """
    begun, newest = record.step_range
    last = newest if last is None else last
    found: dict[tuple[int, str], Deviation] = {}
    for steps in WINDOWS:
        is_long = steps > WINDOW
        if is_long and (last - steps < begun or steps * len(record.places) > MOST_VALUES):
            break
        window = window_until(record, last, steps) if recent is None or is_long else recent
        if window.num_recorded >= steps // 2:
            for each in window.deviations:
                found.setdefault((each.rank, each.section), each)
    return sorted(found.values(), key=lambda each: -each.lost_s)


@dataclass(frozen=True)
class Pauses:
    """A section that takes longer in some steps only.

    Attributes:
        count: steps with a pause, of ``steps`` steps.
        at_once: mean number of ranks that pause in such a step.
        lost_s: longest pause of a step, as the mean of all steps: the other ranks wait for it.
    """

    section: str
    ranks: tuple[int, ...]
    count: int
    steps: int
    at_once: float
    lost_s: float

    def text(self) -> str:
        """Describe the pauses in words."""
        ranks = ", ".join(map(str, self.ranks[:MOST_NAMED])) + (", ..." if len(self.ranks) > MOST_NAMED else "")
        several = f"ranks {ranks}" if len(self.ranks) > 1 else f"rank {ranks}"
        what = LABELS.get(self.section, self.section)
        when = "the ranks at different steps" if self.at_once < 0.75 * len(self.ranks) else "all in the same steps"
        when = f", {when}" if len(self.ranks) > 1 else ""
        lost = f"{self.lost_s * 1e3:.1f} ms a step"
        return f"{several}: {what} pauses in {self.count} of {self.steps} steps{when}, which costs {lost}"


def pauses(record: RunRecord, recent: Window | None = None) -> list[Pauses]:
    """Return the sections that pause in the newest `WINDOW` steps, the costliest first.

    A pause exceeds the rank's usual seconds by more than their spread explains. Ranks that are steadily slower are left
    to `outliers`. See MegaScale, section 6.3: garbage collection, and reductions that ranks start at different times.

    Args:
        recent: the window, if it has been read.
    """
    window, found = recent or window_until(record), []
    if window.num_recorded < WINDOW // 2:
        return []
    own, step_s = window.own, window.step_s
    steady = {(each.rank, each.section) for each in window.deviations}
    for section in PAUSED:
        seconds = own.of(section)
        low, usual = quantiles(seconds, (LOW - 0.15, LOW))
        excess = np.nan_to_num(seconds - usual)
        spread = np.nan_to_num(usual - low)
        spread = np.maximum(spread, np.quantile(spread, MOST_RANKS))  # that of one rank's few steps may be too small
        is_pause = excess > np.maximum(LEAST_PAUSE * step_s, LEAST_PAUSE_SIGMAS * SIGMA_BELOW * spread)
        is_often = excess > np.maximum(LEAST_PAUSE * step_s, window.often_slower(section) / 2)
        slower = np.cumsum(is_often, axis=0)
        agrees = np.arange(1, len(is_often) + 1)[:, None] - 2 * slower + slower[-1]  # with a beginning after each step
        has_begun = agrees.max(axis=0) > MOST_ALIKE * len(is_often)
        is_pause |= is_often & ~has_begun  # what is always slower from some step on is no pause
        is_pause[:, [(rank, section) in steady for rank in own.ranks.tolist()]] = False
        begins = is_pause & ~np.roll(is_pause, 1, axis=0)
        lost_s, count = float((excess * is_pause).max(axis=1).mean()), int(is_pause.any(axis=1).sum())
        if begins.sum() >= LEAST_PAUSES and lost_s > LEAST_SHARE * step_s:
            ranks = tuple(own.ranks[is_pause.any(axis=0)].tolist())
            at_once = float(is_pause.sum() / count)
            found.append(Pauses(section, ranks, count, len(is_pause), at_once, lost_s))
    return sorted(found, key=lambda each: -each.lost_s)
