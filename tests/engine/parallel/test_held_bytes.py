"""Tests that a member's weights, gradients and optimiser state equal those of plans."""

import pytest

from tests.engine.parallel.held_bytes import held_and_predicted
from weft.conf import load
from weft.tools.ranks import run_ranks

COMMON = ["recipe=quickstart", "model.self_check=false", "pipeline.microbatches=2"]
LLAMA = ["+model.overrides.vocab_size=2048", "model.overrides.num_key_value_heads=4"]
SHAPE = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
MIXTRAL = ["model=schema", "model.arch=mixtral", *(f"+model.overrides.{k}={v}" for k, v in (SHAPE | HEADS).items())]
CASES = [
    [*LLAMA, "pipeline.stages=2", "parallel.tensor=2", "zero.stage=0"],
    [*LLAMA, "pipeline.stages=2", "parallel.tensor=2", "zero.stage=1"],
    [*LLAMA, "pipeline.stages=1", "parallel.tensor=2", "zero.stage=1"],
    [*LLAMA, "pipeline.stages=1", "parallel.tensor=4", "zero.stage=0"],
    [*LLAMA, "pipeline.stages=1", "parallel.context=2", "parallel.tensor=2", "zero.stage=1"],
    [*MIXTRAL, "pipeline.stages=1", "parallel.expert=2", "zero.stage=1"],
]


@pytest.mark.slow
def test_plans_are_within_a_hundredth():
    configs = [load([*COMMON, *case]) for case in CASES]
    for rank in run_ranks(4, held_and_predicted, configs, timeout_s=300):
        for case, (held, predicted) in zip(CASES, rank, strict=True):
            assert held == pytest.approx(predicted, rel=0.01), case
