"""Planning against jitter: improve rows by the mean of sampled steps, and prove the gain on other samples."""

from __future__ import annotations

from collections.abc import Iterable

from weft.pipeline.generators.auto_problem import Problem, Rows
from weft.pipeline.generators.auto_search import Search
from weft.pipeline.generators.auto_timing import mean_s

_LEAST_GAIN = 0.005
"""Share of the mean step that rows must save on samples that they were not chosen by."""


def improve_samples(problem: Problem, planned: Rows, others: Iterable[Rows], cap_bytes: float, actions: float) -> Rows:
    """Return rows with a shorter mean step than ``planned``, or ``planned`` if none are shorter by `_LEAST_GAIN`.

    The first half of ``problem.sampled`` chooses, and the second half proves.

    Args:
        planned: rows by the medians.
        others: other rows to start the search from.
        actions: number of actions that the search may time.
    """
    half = problem.samples // 2
    chooses, proves = problem.sampled[:half], problem.sampled[half:]
    start = min((planned, *others), key=lambda rows: mean_s(problem, rows, chooses))
    evaluations = int(actions / sum(map(len, start)) / half)
    searched = Search(problem, start, cap_bytes, sampled=chooses).run(evaluations, 0.0)
    found = min((searched, start), key=lambda rows: mean_s(problem, rows, proves))
    gains = mean_s(problem, found, proves) <= (1 - _LEAST_GAIN) * mean_s(problem, planned, proves)
    return found if gains else planned
