"""What an emulated step beside the real one is judged by."""

from __future__ import annotations

import pytest

from weft.tools.benchmarks import emulation
from weft.tools.benchmarks.emulation import Beside


@pytest.mark.parametrize(
    ("real", "emulated", "to_goal", "to_most"),
    [
        ([1.0, 1.0], 1.004, "yes", "yes"),
        ([1.0, 1.0], 0.99, "no", "yes"),
        ([1.0, 1.0], 1.02, "no", "no"),
        ([0.995, 1.005], 1.009, "yes", "yes"),
        ([0.995, 1.005], 1.03, "no", "no"),
        ([0.755, 1.0, 1.0], 1.0, "not shown: real runs differ by 24.5%", "not shown: real runs differ by 24.5%"),
        ([0.755, 1.0, 1.0], 1.2, "not shown: real runs differ by 24.5%", "not shown: real runs differ by 24.5%"),
    ],
)
def test_the_jobs_own_difference_excuses_an_error_as_long_as_it_is_small(real, emulated, to_goal, to_most):
    row = emulation._row(Beside("job", 4, list(real), [emulated]))
    assert (row["within 0.5%"], row["within 1.5%"]) == (to_goal, to_most)


@pytest.mark.parametrize(
    ("emulated", "real", "code"),
    [(1.0, [1.0], 0), (1.012, [1.0], 1), (1.02, [1.0], 1), (1.0, [0.9, 1.1], 1)],
)
def test_what_is_not_shown_is_not_met(monkeypatch, emulated, real, code):
    monkeypatch.setattr(emulation, "measure_link", lambda *args, **kwargs: None)
    monkeypatch.setattr(emulation, "compare", lambda layout, *args: Beside(layout.name, 4, list(real), [emulated]))
    assert emulation.main(["--jobs", "straight", "two stages"]) == code
