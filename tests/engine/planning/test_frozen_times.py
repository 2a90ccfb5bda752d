"""Frozen weights have no gradients: predicted operations of a step are those that torch counts."""

from dataclasses import replace

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.shapes import sizes
from weft.conf.schema import LoraConfig, ModelConfig, PipelineConfig, WeftConfig
from weft.engine.planning.estimates import planning_costs
from weft.engine.planning.gathering import facts_before_start
from weft.engine.planning.run_plan import settle_placement, split_stages
from weft.engine.stages.files.loading import load_hf_config

SHAPE = sizes(hidden=64, inner=256, layers=4, heads=4, groups=4, words=256)
TOKENS = 32
ADAPTERS = LoraConfig(enabled=True, rank=4, target_modules=["all-linear"])


def made(kind):
    """A model whose weights are trained, or adapters, or its last two layers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    if kind == "adapters":
        return peft.get_peft_model(model, peft.LoraConfig(r=ADAPTERS.rank, target_modules="all-linear"))
    if kind == "every second matrix":
        for name, weight in model.named_parameters():
            weight.requires_grad_("mlp" in name or "embed" in name)
    return model


def counted(model):
    """Products of a step with weights and between tokens, as torch counts them."""
    ids = torch.ones(1, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("kind", ["all weights", "adapters", "every second matrix"])
@pytest.mark.parametrize("traced", [True, False])
def test_predicted_operations_of_a_step_are_those_that_torch_counts(kind, traced, tmp_path):
    config = WeftConfig(model=ModelConfig(overrides=SHAPE), pipeline=PipelineConfig(stages=2, microbatches=4))
    config.data.sequence_length, config.data.cache_dir, config.cluster.ranks = TOKENS, str(tmp_path), 2
    model = made(kind)
    facts = facts_before_start(config, load_hf_config(config.model), model=model)
    facts = replace(facts, flops_per_s=1.0, work=facts.work if traced else None)
    costs = planning_costs(config, facts, split_stages(config, facts, settle_placement(config, facts)))
    forward, backward = counted(model)
    assert sum(stage.forward_s for stage in costs.stages) == pytest.approx(forward, rel=0.1)
    assert sum(stage.input_s + stage.weight_s for stage in costs.stages) == pytest.approx(backward, rel=0.1)
