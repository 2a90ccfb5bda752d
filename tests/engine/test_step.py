"""`WeftEngine.train_batch` is the whole step: DeepSpeed's has no part in it, and nothing that shows is lost."""

import inspect

import pytest

from tests.engine.shown import both, fp16_refused
from weft.engine.engine import WeftEngine
from weft.tools.ranks import run_ranks


def test_a_step_shows_what_deepspeeds_own_shows():
    """Monitor events, progress lines, timers, learning rates and counters, with steps that overflow among them."""
    ((ours, deepspeeds),) = run_ranks(1, both)
    assert ours == deepspeeds
    applied = [counters[0] for counters in ours["counters"][1::2]]
    assert False in applied and True in applied
    assert len(ours["events"]) == 4 * 3 and ours["printed"].count("steps:") == 2 == len(ours["logged"])


def test_fp16_on_a_processor_without_it_is_refused_with_a_remedy():
    with pytest.raises(RuntimeError, match=r"ValueError: train\.precision=fp16: .* set train\.precision=bf16 or fp32"):
        run_ranks(1, fp16_refused)


def test_the_step_fits_on_one_page():
    lines, _ = inspect.getsourcelines(WeftEngine.train_batch)
    assert len(lines) <= 40
