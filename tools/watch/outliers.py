"""Which ranks deviate from their class, steadily or in pauses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def groups(record: RunRecord) -> list[tuple[int, ...]]:
    """Return the classes: the ranks of each pipeline stage."""
    by_stage = defaultdict(list)
    for place in record.places.values():
        by_stage[place.stage].append(place.rank)
    return [tuple(ranks) for ranks in by_stage.values()]


def classes(record: RunRecord) -> dict[int, tuple[int, ...]]:
    """Return each rank's class: the ranks of the same pipeline stage."""
    return {rank: ranks for ranks in groups(record) for rank in ranks}


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


def outliers(record: RunRecord, last: int | None = None, recent: Seconds | None = None) -> list[Deviation]:
    """Return the ranks that are slower than their class over a window of steps, the worst first.

    Ranks of a class are compared within each step, because other programs of a host slow all its ranks at once. A
    small deviation needs the longer ones of `WINDOWS`. A rank without peers is compared with its own first steps, or,
    where a file has measured costs (``pipeline.costs_file``), with the other ranks by these costs.

    Args:
        last: last step of the window. None means the newest.
        recent: seconds of the newest window, if they have been read.
    """
    begun, newest = record.step_range
    last = newest if last is None else last
    found: dict[tuple[int, str], Deviation] = {}
    for window in WINDOWS:
        is_long = window > WINDOW
        if is_long and (last - window < begun or window * len(record.places) > MOST_VALUES):
            break
        if recent is None or is_long:
            seconds = record.steps.window(max(begun + WARM_UP, last - window + 1), last, READ)
        else:
            seconds = recent
        own = _own_work(record, seconds)
        if int(own.is_recorded.any(axis=1).sum()) >= window // 2:
            for each in _deviations(record, own, (begun + WARM_UP, last - window)):
                found.setdefault((each.rank, each.section), each)
    return sorted(found.values(), key=lambda each: -each.lost_s)


def _deviations(record: RunRecord, own: Seconds, before: tuple[int, int]) -> Iterator[Deviation]:
    """Yield the deviations of a window, whose first steps before it are ``before``."""
    step_s = float(np.nanmedian(own.of("step")))
    for section in OWN:
        seconds = own.of(section)
        usual = quantiles(seconds, (LOW,))[0]
        ratios, expected = np.full(seconds.shape, np.nan), np.zeros(len(usual))
        middle, names = np.full(len(usual), 0.5), dict[int, str]()
        for group in groups(record):
            places = _present(own.ranks, group, usual)
            if len(places) > 1:
                ratios[:, places] = against_peers(seconds[:, places])
                expected[places] = lower_median(usual[places])
                names |= dict.fromkeys(places.tolist(), f"its class of {len(places)} ranks")
            elif len(places):
                place = int(places[0])
                expected[place], names[place] = _alone(record, own.ranks, usual, place, section, before)
                ratios[:, place] = logs(seconds[:, place]) - logs(expected[place])
                middle[place] = LOW
        share, error = deviation(ratios, middle)
        is_slow = np.nan_to_num(share) > np.maximum(LEAST_DEVIATION, np.expm1(LEAST_SIGMAS * error))
        is_slow &= np.nan_to_num(share) * expected > LEAST_SHARE * step_s
        for at in np.flatnonzero(is_slow).tolist():
            if is_steady(ratios[:, at], float(share[at]), float(error[at])):
                lost_s = float(share[at] * expected[at])
                yield Deviation(int(own.ranks[at]), section, float(share[at]), lost_s, names[at])


def _often_slower(record: RunRecord, ranks: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the seconds by which ranks are slower than their class in many steps, or infinity.

    A single step has to exceed the usual by more than its own noise explains. The quantile HIGH of a window has less.
    """
    usual, found = quantiles(seconds, (LOW,))[0], np.full(seconds.shape[1], np.inf)
    share, spread, expected = (np.full(len(usual), np.nan) for _ in range(3))
    for group in groups(record):
        places = _present(ranks, group, usual)
        if len(places) > 1:
            below, often, above = quantiles(against_peers(seconds[:, places]), (HIGH - 0.15, HIGH, HIGH + 0.15))
            share[places], spread[places] = np.expm1(often - lower_median(often)), above - below
            expected[places] = lower_median(usual[places])
    if np.isfinite(spread).any():
        least = least_share(np.nanmedian(spread), (~np.isnan(seconds)).sum(axis=0))
        is_often = np.nan_to_num(share) > least
        found[is_often] = (share * expected)[is_often]
    return found


def _present(ranks: np.ndarray, group: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Return the indices of the ranks of a group that have a value."""
    places = np.searchsorted(ranks, group)
    return places[~np.isnan(values[places])]


def _alone(
    record: RunRecord, ranks: np.ndarray, usual: np.ndarray, place: int, section: str, before: tuple[int, int]
) -> tuple[float, str]:
    """Return the expected seconds of a section of a rank without peers, or 0, and their origin in words.

    Args:
        usual: measured seconds of all ranks.
        before: steps before the window.
    """
    is_known = ~np.isnan(usual)
    if section == "compute" and record.config["pipeline"].get("costs_file") and is_known.sum() > 2:
        stands = [record.places[each] for each in ranks.tolist()]
        planned = np.array([record.predictions[one.line].busy_s[one.stage] for one in stands])
        pace = float(np.median(usual[is_known] / planned[is_known]))
        return pace * float(planned[place]), "its costs, at the pace of the other ranks"
    first, last = before[0], min(before[1], before[0] + WINDOW - 1)
    if last - first + 1 < WINDOW // 2:
        return 0.0, ""
    own = _own_work(record, record.steps.window(first, last, READ)).of(section)[:, place]
    if np.isnan(own).all():
        return 0.0, ""
    return float(np.nanquantile(own, LOW)), f"in steps {first} to {last}"


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


def pauses(record: RunRecord, recent: Seconds | None = None) -> list[Pauses]:
    """Return the sections that pause in the newest `WINDOW` steps, the costliest first.

    A pause exceeds the rank's usual seconds by more than their spread explains. Ranks that are steadily slower are left
    to `outliers`. See MegaScale, section 6.3: garbage collection, and reductions that ranks start at different times.

    Args:
        recent: seconds of the window, if they have been read.
    """
    begun, last = record.step_range
    if recent is None:
        recent = record.steps.window(max(begun + WARM_UP, last - WINDOW + 1), last, READ)
    own, found = _own_work(record, recent), []
    if int(own.is_recorded.any(axis=1).sum()) < WINDOW // 2:
        return []
    steady = {(each.rank, each.section) for each in _deviations(record, own, (begun + WARM_UP, last - WINDOW))}
    step_s = float(np.nanmedian(own.of("step")))
    for section in PAUSED:
        seconds = own.of(section)
        low, usual = quantiles(seconds, (LOW - 0.15, LOW))
        excess = np.nan_to_num(seconds - usual)
        spread = np.nan_to_num(usual - low)
        spread = np.maximum(spread, np.quantile(spread, MOST_RANKS))  # that of one rank's few steps may be too small
        is_pause = excess > np.maximum(LEAST_PAUSE * step_s, LEAST_PAUSE_SIGMAS * SIGMA_BELOW * spread)
        is_often = excess > np.maximum(LEAST_PAUSE * step_s, _often_slower(record, own.ranks, seconds) / 2)
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
