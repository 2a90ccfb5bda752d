"""Tests of the benchmark's evaluation of spans."""

import pytest

from benchmarks.serving.figures import idle_between, use_of
from benchmarks.serving.requests import read_trace


def test_shares_of_a_ranks_time():
    work, prefills = [(0, 2), (6, 8), (10, 12)], [(3, 5), (7, 9)]
    use = use_of(work, prefills, [(0, 10)])
    assert idle_between(work) == [(2, 6), (8, 10)]
    assert use.trained == pytest.approx(0.4) and use.prefilled == pytest.approx(0.3)
    assert use.bubbles_used == pytest.approx(0.5) and use.outside == pytest.approx(0.25)


def test_a_trace_is_scaled_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4000,10"]
    path.write_text("\n".join([*lines, "2023-11-16 18:17:13.9799600,1000,8"]))
    first, second = read_trace(path, 10, most_tokens=400, over_s=5.0)
    assert (first.after_s, first.tokens) == (0.0, 400)
    assert second.after_s == pytest.approx(5.0) and second.tokens == 100
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="trace"):
        read_trace(path, 10, most_tokens=400, over_s=5.0)
    with pytest.raises(ValueError, match="trace"):
        read_trace(tmp_path / "none.csv", 10, most_tokens=400, over_s=5.0)
