"""Tests of the norm by which gradients are clipped."""

import pytest

from tests.engine.deepspeed_clipping import CLIP, clipped_step
from weft.tools.ranks import run_ranks


@pytest.mark.slow
def test_deepspeeds_pipeline_clips_by_the_norm_of_its_first_stage():
    """docs/zero.md says so; Weft's equals a single process's (test_training.py), with clipping."""
    first, last = run_ranks(2, clipped_step)
    norm_first, norm_last = first["norms"]
    assert first["step"] == pytest.approx(CLIP, rel=1e-3)
    assert last["step"] == pytest.approx(CLIP * norm_last / norm_first, rel=1e-3)
    of_the_model = (norm_first**2 + norm_last**2) ** 0.5
    assert last["step"] != pytest.approx(CLIP * norm_last / of_the_model, rel=0.1)
