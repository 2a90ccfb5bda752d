"""Deviation: decides from measured costs that the schedule must be planned again, and never from noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from weft.pipeline.costs import CostModel, LinkCost

TOLERANCE = 0.2
"""Smallest relative change of a stage's or a link's cost that counts."""
_WIDEST = 1.0
"""Tolerance at most, however noisy the first windows were. A link at a third of its rate always counts."""
_SPREADS = 3.0
"""Tolerance in multiples of the spread that the first windows had."""
LONGEST_S = 3600.0
"""A longer duration is not a measurement."""
_MEMORY = 64
"""A plan makes the next one wait twice as long, until this many times ``steps`` have passed."""
_MOST_DOUBLINGS = 6
_PARTS = 3
"""Numbers of a stage in a vector: seconds of a forward, an input gradient and a weight gradient."""


def interval_of(steps: int, most: int) -> int:
    """Return the number of steps between two exchanges of measured costs, so that ``steps`` hold five if possible."""
    return max(1, min(most, steps // 5))


def clean(vector: Sequence[float]) -> tuple[float, ...]:
    """Replace numbers that are no durations by 0, which means not measured: NaN, infinite, negative or too long."""
    return tuple(value if 0.0 < value <= LONGEST_S else 0.0 for value in vector)


@dataclass(kw_only=True)
class Deviation:
    """Compares windows of measured costs with a reference, the same on all ranks.

    A vector has three durations of each virtual stage of each replica, and then the seconds per byte of each pair of
    sites. Its numbers must have been `clean`. The first windows become the reference, and their spread widens the
    tolerance. A replica that deviates from the others already then is compared with the median one, and a stage that
    deviates from ``plan_costs`` more than the median stage is compared with that.

    Attributes:
        steps: number of consecutive steps that must deviate.
        interval: number of steps of a window.
        reference: the costs that the schedule counts on, or empty while the first windows are collected.
        measured: the smallest values of the windows that deviated, after `observe` has returned True.
        plan_costs: the costs that the first schedule was planned with, as a vector, or empty if they are estimates.
    """

    num_stages: int
    steps: int
    interval: int
    replicas: int = 1
    reference: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()
    plan_costs: tuple[float, ...] = ()
    _windows: list[tuple[float, ...]] = field(default_factory=list)
    _runs: list[int] = field(default_factory=list)
    """Number of consecutive windows, until now, in which each stage and link deviates."""
    _tolerances: tuple[float, ...] = ()
    _planned_at: list[int] = field(default_factory=list)

    def observe(self, step: int, vector: Sequence[float]) -> bool:
        """Take the window that ends with ``step``. Return True if the schedule must be planned with `measured`."""
        window = clean(vector)
        self._windows.append(window)
        if not self.reference:
            if len(self._windows) > self._windows_of(self.steps):  # the first has slow first steps
                self._settle_reference(self._windows[1:])
            return False
        ratios = self._ratios(window)
        self._runs = [
            run + 1 if out else 0
            for run, out in zip(self._runs or [0] * len(ratios), self._beyond(ratios), strict=True)
        ]
        longest = max(self._runs)
        self._windows = self._windows[len(self._windows) - longest :]
        if longest < self._windows_of(self.patience(step)):
            return False
        self.measured = _least(self._windows)
        return any(self._beyond(self._ratios(self.measured)))

    def patience(self, step: int) -> int:
        """Return the number of consecutive steps that must deviate at ``step``: twice as many for each recent plan."""
        self._planned_at = [at for at in self._planned_at if step - at < _MEMORY * self.steps]
        return self.steps * 2 ** min(_MOST_DOUBLINGS, len(self._planned_at))

    def planned(self, step: int) -> None:
        """Take `measured` as the reference, because the schedule has been planned with it."""
        self.reference = tuple(new or old for new, old in zip(self.measured, self.reference, strict=True))
        self._windows.clear()
        self._runs.clear()
        self._planned_at.append(step)

    def changes(self) -> dict[str, float]:
        """Return how many times as long each stage and link takes as in the reference, if beyond its tolerance."""
        ratios = self._ratios(self.measured)
        links = len(self.reference) - self._num_durations
        sites = round(links**0.5)
        whose = [f" of replica {replica}" for replica in range(self.replicas)] if self.replicas > 1 else [""]
        names = [f"stage {stage}{replica}" for replica in whose for stage in range(self.num_stages)]
        names += [f"link from site {pair // sites} to {pair % sites}" for pair in range(links)]
        return {name: ratio for name, ratio, out in zip(names, ratios, self._beyond(ratios), strict=True) if out}

    def slower(self) -> list[tuple[int, int]]:
        """Return replica and stage of each stage that takes longer than in the reference, beyond its tolerance."""
        ratios = self._ratios(self.measured)
        slower = [out and ratio > 1.0 for ratio, out in zip(ratios, self._beyond(ratios), strict=True)]
        return [divmod(number, self.num_stages) for number in range(self.num_stages * self.replicas) if slower[number]]

    def _windows_of(self, steps: int) -> int:
        return ceil(steps / self.interval)

    def _settle_reference(self, windows: Sequence[tuple[float, ...]]) -> None:
        self.reference = _least(windows)
        ratios = [self._ratios(window) for window in windows]
        spreads = [max(abs(ratio - 1.0) for ratio in column) for column in zip(*ratios, strict=True)]
        self._tolerances = tuple(min(_WIDEST, max(TOLERANCE, _SPREADS * spread)) for spread in spreads)
        self.reference = self._as_peers()
        self.reference = self._as_planned()
        self._windows.clear()

    def _as_peers(self) -> tuple[float, ...]:
        """Return the reference with the median replica's durations for each stage that deviates from them."""
        totals, found = self._totals(self.reference), list(self.reference)
        for stage in range(self.num_stages):
            peers = range(stage, self.num_stages * self.replicas, self.num_stages)
            measured = sorted((totals[at], at) for at in peers if totals[at])
            usual_s, usual = measured[(len(measured) - 1) // 2] if measured else (0.0, 0)
            for total_s, at in measured:
                if _is_beyond(total_s / usual_s, self._tolerances[at]):
                    own, peer = (slice(_PARTS * number, _PARTS * (number + 1)) for number in (at, usual))
                    found[own] = self.reference[peer]
        return tuple(found)

    def _as_planned(self) -> tuple[float, ...]:
        """Return the reference with the planned durations of stages that deviate, at the speed of the median stage."""
        found, totals = (
            list(self.reference),
            zip(self._totals(self.reference), self._totals(self.plan_costs), strict=False),
        )
        ratios = {at: new / old for at, (new, old) in enumerate(totals) if new and old}
        usual = sorted(ratios.values())[(len(ratios) - 1) // 2] if ratios else 1.0
        for at, ratio in ratios.items():
            if _is_beyond(ratio / usual, self._tolerances[at]):
                own = slice(_PARTS * at, _PARTS * (at + 1))
                found[own] = [usual * value for value in self.plan_costs[own]]
        return tuple(found)

    def _beyond(self, ratios: Sequence[float]) -> list[bool]:
        return [_is_beyond(*each) for each in zip(ratios, self._tolerances, strict=True)]

    def _ratios(self, vector: Sequence[float]) -> list[float]:
        """Return the cost of each stage and link over the reference's, or 1 where one of them was not measured."""
        pairs = zip(self._totals(vector), self._totals(self.reference), strict=True)
        return [new / old if new and old else 1.0 for new, old in pairs]

    def of_replica(self, vector: Sequence[float], replica: int) -> tuple[float, ...]:
        """Return the numbers of one replica's stages, and of the links."""
        size = _PARTS * self.num_stages
        return *vector[replica * size : (replica + 1) * size], *vector[self._num_durations :]

    @property
    def _num_durations(self) -> int:
        return _PARTS * self.num_stages * self.replicas

    def _totals(self, vector: Sequence[float]) -> list[float]:
        stages = (vector[at : at + _PARTS] for at in range(0, self._num_durations, _PARTS))
        return [*(sum(stage) if all(stage) else 0.0 for stage in stages), *vector[self._num_durations :]]


def _is_beyond(ratio: float, tolerance: float) -> bool:
    return not 1.0 / (1.0 + tolerance) <= ratio <= 1.0 + tolerance


def _least(windows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the smallest of each number over the windows that have it, because load only adds to durations."""
    return tuple(min(filter(None, column), default=0.0) for column in zip(*windows, strict=True))


def with_measured(costs: CostModel, vector: Sequence[float], reference: Sequence[float], num_sites: int) -> CostModel:
    """Return the costs with a vector's durations, and with the bandwidths of links changed in the measured ratio.

    Args:
        costs: provides bytes, latencies and bandwidths, and what was not measured.
        reference: vector that was measured while links were as in ``costs``.
    """
    stages = []
    for number, stage in enumerate(costs.stages):
        forward_s, input_s, weight_s = vector[_PARTS * number : _PARTS * (number + 1)]
        if forward_s and input_s and weight_s:
            stage = replace(stage, forward_s=forward_s, input_s=input_s, weight_s=weight_s)
        stages.append(stage)
    first = _PARTS * len(costs.stages)
    links = dict(costs.wan_links)
    for pair, (new, old) in enumerate(zip(vector[first:], reference[first:], strict=True)):
        if new and old and new != old:
            here, there = divmod(pair, num_sites)
            links[here, there] = _slower(costs.link(here, there), new / old)
    return replace(costs, stages=tuple(stages), wan_links=tuple(links.items()))


def _slower(link: LinkCost, ratio: float) -> LinkCost:
    pair_bps = link.pair_bps if link.pair_bps == inf else link.pair_bps / ratio
    return replace(link, bandwidth_bps=link.bandwidth_bps / ratio, pair_bps=pair_bps)
