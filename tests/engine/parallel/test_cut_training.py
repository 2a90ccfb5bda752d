"""A model of which ranks hold parts trains as a whole one does, over stages, replicas and ZeRO's stages."""

import pytest

from tests.engine.parallel.cut_stage import alone, cut_config, cut_losses
from weft.tools.ranks import run_ranks

STEPS = 4
CASES = [(2, 2, 0, 1), (1, 2, 0, 2), (2, 2, 1, 1), (1, 2, 1, 2), (1, 2, 3, 2), (1, 4, 2, 1)]


@pytest.mark.slow
def test_losses_and_norms_are_those_of_one_process():
    configs = [cut_config(stages, tensor, zero, replicas) for stages, tensor, zero, replicas in CASES]
    expected = alone(STEPS)
    for ranks in run_ranks(4, cut_losses, configs, STEPS, timeout_s=400):
        for case, found in zip(CASES, ranks, strict=True):
            for step, (loss, norm) in enumerate(found):
                assert loss == pytest.approx(expected[step][0], rel=1e-5), (case, step)
                assert norm == pytest.approx(expected[step][1], rel=1e-5), (case, step)
