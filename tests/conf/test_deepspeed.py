"""The DeepSpeed JSON is one that DeepSpeed itself accepts, and builds no C++ for."""

import json

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from weft.conf import load
from weft.conf.deepspeed import deepspeed_config
from weft.conf.schema import WeftConfig
from weft.engine.deepspeed.table import MUON_PARAMETERS


class Replicas:
    """The interface of a model-parallel unit that DeepSpeed uses."""

    def __init__(self, count: int) -> None:
        self.get_data_parallel_world_size = lambda: count


@pytest.fixture(autouse=True)
def _in_a_group(monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)


def accepted(settings: list[str], world_size: int) -> DeepSpeedConfig:
    config = load(settings)
    emitted = deepspeed_config(config, world_size)
    assert json.loads(json.dumps(emitted)) == emitted
    return DeepSpeedConfig(emitted, Replicas(world_size // config.pipeline.stages))


def test_batch_sizes():
    read = accepted(["recipe=quickstart"], 8)
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (32, 2, 8)
    assert read.steps_per_print is None


def test_the_rest():
    read = accepted(["zero=stage1", "train.precision=bf16", "optimizer.clip=0.5", "zero.reduce_bucket_size=9"], 1)
    assert (read.zero_optimization_stage, read.zero_config.reduce_bucket_size) == (1, 9)
    assert read.bfloat16_config.enabled and not read.float16_config.enabled
    assert read.gradient_clipping == 0.5
    assert accepted(["train.precision=fp16"], 1).float16_config.enabled


def test_logs_are_the_recipes_own():
    """DeepSpeed's monitors count samples, and would share an axis with what counts steps."""
    monitors = accepted(["logging=all"], 1).monitor_config
    assert not monitors.enabled


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_optimizers_are_torchs_own(kind, monkeypatch):
    """DeepSpeed makes the optimizer of the JSON without building an extension."""
    import torch
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime.engine import DeepSpeedEngine

    monkeypatch.setattr(OpBuilder, "jit_load", lambda *_, **__: pytest.fail("an extension would be built"))
    read = accepted([f"optimizer.kind={kind}", "optimizer.lr=0.25"], 1)
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(engine)
    engine._config, engine.client_optimizer = read, None
    made = engine._configure_basic_optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(made).__module__.startswith("torch.optim")
    assert made.defaults["lr"] == 0.25


def test_a_world_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"pipeline\.stages=4: 6 processes"):
        deepspeed_config(load(["recipe=quickstart"]), 6)


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_muon_has_its_own_rate_or_the_shared_one(rate):
    config = WeftConfig()
    config.optimizer.kind, config.optimizer.muon_lr = type(config.optimizer.kind).muon, rate
    emitted = deepspeed_config(config, 1)["optimizer"]
    assert emitted["type"] == "Muon" and emitted["params"].keys() <= MUON_PARAMETERS
    assert (emitted["params"]["lr"], emitted["params"]["muon_lr"]) == (3e-4, rate or 3e-4)


def test_lamb_is_passed_on():
    config = WeftConfig()
    config.optimizer.kind = type(config.optimizer.kind).lamb
    assert deepspeed_config(config, 1)["optimizer"]["type"] == "Lamb"
