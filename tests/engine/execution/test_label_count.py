"""The step's count of labels is on its way while layers compute, and waited for where the loss begins."""

import pytest
import torch

from benchmarks.peers.emulated_stage import EmulatedStage, EmulatedWork
from weft.engine.execution.compute import Compute
from weft.engine.execution.step_state import LabelCount, StepState
from weft.pipeline.action import Action, Op
from weft.pipeline.placement import Placement


def test_a_count_is_filled_once():
    count = LabelCount(torch.tensor(3), None)
    assert not count.is_known and count.items == 0
    assert count.wait() is count.items and count.items == 3 and count.is_known
    version = count.items._version  # autograd has saved it by the second micro-batch
    count.wait()
    assert count.items._version == version


def test_a_step_without_labels_is_refused():
    with pytest.raises(ValueError, match="no token of this step carries a label"):
        LabelCount(torch.tensor(0), None).wait()


@pytest.mark.parametrize("training", [True, False])
def test_the_last_block_waits_for_the_count_and_no_other(training):
    order = []

    class Noted(LabelCount):
        def wait(self):
            order.append("count")
            return super().wait()

    work = EmulatedWork(forward_s=0, input_s=0, weight_s=0, hidden_bytes=64)
    stage = EmulatedStage(work, index=0, layers=(range(3),))
    for layer in stage.layers:
        layer.register_forward_pre_hook(lambda *_: order.append("layer"))
    state = StepState(batches=[{}], num_items=Noted(torch.tensor(4), None), training=training)
    compute = Compute(stages={0: stage}, placement=Placement.straight(1), seed_gradient=torch.ones_like)
    compute.forward(state, Action(Op.F, 0, 0))
    assert order == ["layer", "layer", "layer", "count"]
    assert state.num_items.is_known
