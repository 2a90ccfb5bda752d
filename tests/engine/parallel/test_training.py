"""Ranks that share sequences and experts train as one process does."""

import pytest

from tests.engine.tiny import many_losses, reference_losses, tiny_config
from weft.tools.ranks import run_ranks

MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
# (ranks, axes, keywords of tiny_config); replicas follow. The job has four ranks.
CASES = {
    "context 2 x stages 2": ({"context": 2}, {"stages": 2}),
    "context 2 x replicas 2, ZeRO-1": ({"context": 2}, {"stages": 1, "zero": 1}),
    "context 2 x replicas 2, ZeRO-3": ({"context": 2}, {"stages": 1, "zero": 3}),
    "expert 2 x stages 2": ({"expert": 2}, {"stages": 2}),
    "expert 2 x replicas 4, ZeRO-1": ({"expert": 2}, {"stages": 1, "zero": 1}),
    "expert 2 x replicas 4, ZeRO-3": ({"expert": 2}, {"stages": 1, "zero": 3}),
    "expert 4": ({"expert": 4}, {"stages": 1}),
    "context 2, expert 2, stages 2, tied": ({"context": 2, "expert": 2}, {"stages": 2, "tied": True}),
    "context 2, expert 4, ZeRO-3": ({"context": 2, "expert": 4}, {"stages": 1, "zero": 3}),
    "context 2 x stages 2, w on a fold": ({"context": 2}, {"stages": 2, "schedule": "w", "placement": "fold"}),
    "expert 2 x stages 2, w on a fold": ({"expert": 2}, {"stages": 2, "schedule": "w", "placement": "fold"}),
}
RANKS, STEPS = 4, 20


def config_of(axes, keywords):
    config = tiny_config(layers=4, **keywords)
    if "expert" in axes:
        config.model.arch = "mixtral"
        config.model.overrides = config.model.overrides | MIXTURE
    for axis, size in axes.items():
        setattr(config.parallel, axis, size)
    return config


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_equal_those_of_one_process():
    """Twenty steps of four micro-batches, clipped, warmed up and decayed."""
    configs = {name: config_of(*case) for name, case in CASES.items()}
    got = run_ranks(RANKS, many_losses, list(configs.values()), STEPS, timeout_s=800)
    for number, (name, config) in enumerate(configs.items()):
        replicas = RANKS // config.pipeline.stages // config.parallel.context
        want = reference_losses(config, replicas, STEPS)
        for rank in got:
            assert rank[number] == pytest.approx(want, rel=1e-5), name
