"""Saved activations that go to host memory and come back."""

import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.engine.backward.test_models import build, gradients, hidden_of
from weft.conf.schema import Recompute
from weft.engine.backward import SplitBackward
from weft.engine.backward.offload import HostMemory
from weft.engine.models.recomputation import recompute

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [Recompute.none, Recompute.layers])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_gradients_are_equal_after_offload(name, split, kind):
    found = []
    host = HostMemory(CPU)
    for movable in (False, True):
        stage = build(name)
        recompute(stage.model, kind)
        hidden = hidden_of(stage, use_hidden=True)
        backward = SplitBackward(stage)
        loss, saved = backward.forward(lambda: stage(hidden), hidden, split=split, movable=movable)  # noqa: B023
        if movable:
            saved.movable.begin_offload(host)
            before = saved.live_bytes
            saved.movable.end_offload()
            assert saved.live_bytes == before - saved.movable.away_bytes < before
            saved.movable.begin_reload()
            assert saved.live_bytes == before
        backward.full_backward(saved, torch.ones_like(loss))
        found.append((loss.detach(), hidden.grad, gradients(stage), saved.activation_bytes))
    (loss, below, weights, num_bytes), (again, there, others, same) = found
    assert torch.equal(loss, again) and torch.equal(below, there) and num_bytes == same
    assert all(torch.equal(others[name], want) for name, want in weights.items())


def test_offload_frees_what_it_moves_and_reuses_buffers():
    stage, host = build("llama"), HostMemory(CPU)
    backward = SplitBackward(stage)
    hidden = hidden_of(stage, use_hidden=True)

    def forward():
        loss, saved = backward.forward(lambda: stage(hidden), hidden, movable=True)
        saved.movable.begin_offload(host)
        gc.collect()
        return loss, saved

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss, saved = forward()
        saved.movable.end_offload()
        freed = saved.movable.away_bytes
        saved.movable.begin_reload()
        backward.full_backward(saved, torch.ones_like(loss))
        del loss, saved
        buffers = sum(map(len, host._free.values()))
        _, saved = forward()
        saved.movable.end_offload()
    changes = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert freed > 0.8 * saved.activation_bytes
    assert sum(map(len, host._free.values())) == 0 and buffers > 0, "the second micro-batch took the same buffers"
    assert sum(num_bytes for num_bytes in changes if num_bytes < 0) <= -2 * freed


def test_a_backward_before_its_reload_fails():
    stage = build("llama")
    loss, saved = (backward := SplitBackward(stage)).forward(lambda: stage(None), None, movable=True)
    saved.movable.begin_offload(HostMemory(CPU))
    saved.movable.end_offload()
    with pytest.raises(AssertionError, match="before its activations were back"):
        backward.full_backward(saved, torch.ones_like(loss))
