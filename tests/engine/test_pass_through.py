"""Without a `weft` section `weft.initialize` is DeepSpeed's, less an operator that may never come."""

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from torch import nn

from weft.engine.initialize import initialize


@pytest.mark.parametrize("config", [{"train_batch_size": 1}, {"train_batch_size": 1, "weft": {"enabled": False}}])
def test_the_operator_that_waits_for_a_stale_lock_is_left_out(monkeypatch, config):
    if get_accelerator().device_name() != "cpu":
        pytest.skip("DeepSpeed compiles the operator for CPUs only")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    seen = []

    def fake(**given):
        seen.append((given["config"], deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]))
        return "DeepSpeed's"

    monkeypatch.setattr(deepspeed, "initialize", fake)
    assert initialize(model=nn.Linear(1, 1), config=config) == "DeepSpeed's"
    assert seen == [({"train_batch_size": 1}, False)]
