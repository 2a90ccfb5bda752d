"""Stages that train nothing: adapters in a few layers only, or layers that are frozen."""

import pytest
import torch

from tests.engine.losses import frozen_losses
from tests.engine.parallel.axis_training import go_on_all
from tests.engine.tiny import many_losses, reference_losses, tiny_config
from weft.conf.schema import LoraConfig
from weft.engine.deepspeed.construction import parameter_groups
from weft.tools.ranks import run_ranks

FIRST, LAST = ["model.layers.0.self_attn.q_proj"], ["model.layers.3.self_attn.q_proj", "model.layers.3.mlp.up_proj"]
CASES = [
    (LAST, {"zero": 3, "compare_every": 1}),
    (LAST, {"schedule": "dualpipev", "placement": "fold", "microbatches": 8}),
    (FIRST, {"schedule": "zbv", "placement": "fold", "zero": 1}),
]


def adapted(targets, **keywords):
    config = tiny_config(layers=4, **keywords)
    config.model.lora = LoraConfig(enabled=True, dropout=0.0, target_modules=targets)
    return config


def test_nothing_to_train_is_an_empty_group():
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    (group,) = parameter_groups(frozen.named_parameters(), 0.1)
    assert group["params"] == []
    torch.optim.AdamW([group]).step()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_adapters_in_one_stage_train_as_in_one_process(tmp_path):
    configs = [adapted(targets, **keywords) for targets, keywords in CASES]
    for config, losses in zip(configs, run_ranks(4, many_losses, configs, 3, timeout_s=200)[0], strict=True):
        assert losses == pytest.approx(reference_losses(config, 2, 3), rel=1e-5), config.pipeline.schedule
    folder, config = str(tmp_path), configs[0]
    written, read = run_ranks(4, go_on_all, [(config, folder, True), (config, folder, False)], timeout_s=150)[0]
    assert read == written


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_first_stage_that_a_caller_froze_trains_as_in_one_process():
    alone, staged = (run_ranks(count, frozen_losses, count, timeout_s=90)[0] for count in (1, 2))
    assert staged == pytest.approx(alone, rel=1e-5)
