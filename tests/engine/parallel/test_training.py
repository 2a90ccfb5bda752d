"""Ranks that share sequences and experts train as one process does, over several steps and on folds."""

import pytest

from tests.engine.tiny import many_losses, reference_losses, tiny_config
from weft.tools.ranks import run_ranks

RANKS, STEPS = 4, 6
"""Three steps of warm-up, and three of decay."""
# Keywords of tiny_config; replicas follow.
CASES = {
    "expert 2 x stages 2": {"expert": 2, "stages": 2},
    "expert 2 x replicas 4, ZeRO-3": {"expert": 2, "stages": 1, "zero": 3},
    "context 2, expert 2, stages 2, tied": {"context": 2, "expert": 2, "stages": 2, "tied": True},
    "context 2, expert 4, ZeRO-3": {"context": 2, "expert": 4, "stages": 1, "zero": 3},
    "context 2, w on a fold, LoRA": {"context": 2, "stages": 2, "schedule": "w", "placement": "fold", "lora": True},
    "tensor 2, expert 2, w on a fold": {"expert": 2, "tensor": 2, "stages": 2, "schedule": "w", "placement": "fold"},
    "expert 2, w on a fold": {"expert": 2, "stages": 2, "schedule": "w", "placement": "fold"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_equal_those_of_one_process():
    """Steps of four micro-batches, clipped, warmed up and decayed."""
    configs = {name: tiny_config(layers=4, **keywords) for name, keywords in CASES.items()}
    for config in configs.values():
        config.train.steps = STEPS
    got = run_ranks(RANKS, many_losses, list(configs.values()), STEPS, timeout_s=800)
    for number, (name, config) in enumerate(configs.items()):
        parallel = config.parallel
        want = reference_losses(config, RANKS // config.pipeline.stages // parallel.context // parallel.tensor, STEPS)
        for rank in got:
            assert rank[number] == pytest.approx(want, rel=1e-5), name
