"""The fit is the least squares over non-negative coefficients, and earlier measurements count less."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.inference.placement.nonnegative_fit import FORGETTING, PRIOR, PSEUDO, PSEUDO_WEIGHT, Sums, features

CHUNKS = st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 1e5), st.floats(1e-5, 1e3)), min_size=1, max_size=12)


def told(chunks):
    sums = Sums()
    for tokens, context, seconds in chunks:
        sums.add(tokens, context, seconds)
    return sums


def residual(sums, coefficients, row):
    """Derivative of half the squared error by a coefficient, in units of the prior."""
    scaled = [value / unit for value, unit in zip(coefficients, PRIOR, strict=True)]
    return sum(a * b for a, b in zip(sums.square[row], scaled, strict=True)) - sums.right[row]


@given(CHUNKS)
def test_no_coefficient_can_be_moved_for_the_better(chunks):
    """The conditions of Karush, Kuhn and Tucker, which tell the minimum of a convex function."""
    sums = told(chunks)
    found = sums.fit()
    for row, value in enumerate(found):
        slope, scale = residual(sums, found, row), sum(map(abs, sums.square[row])) + abs(sums.right[row])
        assert value >= 0
        assert slope >= -1e-6 * scale
        if value > 0:
            assert slope <= 1e-6 * scale


@given(st.tuples(*[st.floats(0.1, 10)] * 3))
@settings(max_examples=25)
def test_what_was_measured_without_noise_is_predicted(scales):
    truth = [scale * unit for scale, unit in zip(scales, PRIOR, strict=True)]
    chunks = list(itertools.product((16, 200, 2000), (0, 1000, 30000)))
    exact = {chunk: sum(a * x for a, x in zip(truth, features(*chunk), strict=True)) for chunk in chunks}
    found = told([(*chunk, seconds) for chunk, seconds in exact.items()] * 20).fit()
    for chunk, seconds in exact.items():
        assert sum(a * x for a, x in zip(found, features(*chunk), strict=True)) == pytest.approx(seconds, rel=0.02)


def test_before_any_measurement_it_is_the_prior():
    assert Sums().fit() == pytest.approx(PRIOR)
    assert len(PSEUDO) == len(PRIOR)


@given(CHUNKS)
def test_each_measurement_discounts_those_before(chunks):
    sums = told(chunks)
    given = [(tokens, context, None) for tokens, context in PSEUDO] + chunks
    right, square = [0.0] * 3, [[0.0] * 3 for _ in range(3)]
    for age, (tokens, context, seconds) in enumerate(reversed(given)):
        x = features(tokens, context)
        weight = FORGETTING**age * (PSEUDO_WEIGHT if seconds is None else 1.0)
        seconds = sum(a * unit for a, unit in zip(x, PRIOR, strict=True)) if seconds is None else seconds
        row = [a * unit / seconds for a, unit in zip(x, PRIOR, strict=True)]
        for i in range(3):
            right[i] += weight * row[i]
            for j in range(3):
                square[i][j] += weight * row[i] * row[j]
    assert sums.right == pytest.approx(right)
    for mine, theirs in zip(sums.square, square, strict=True):
        assert mine == pytest.approx(theirs)
