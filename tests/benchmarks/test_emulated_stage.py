"""Emulated layers: where their time goes, and that engines can tell no difference."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from benchmarks.peers import emulated_stage as emulation
from benchmarks.peers.emulated_stage import EmulatedLayer, EmulatedStage, EmulatedWork
from weft.engine.backward import SplitBackward

WORK = EmulatedWork(forward_s=1.0, input_s=2.0, weight_s=4.0, hidden_bytes=64)
HALVES = (range(3), range(3, 6))


@pytest.fixture
def slept(monkeypatch):
    """Seconds that would have been slept since the last look."""
    now, seen = [0.0], [0.0]  # a clock that only pauses move

    def look():
        value, seen[0] = now[0] - seen[0], now[0]
        return value

    monkeypatch.setattr(emulation, "pause", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(emulation, "perf_counter", lambda: now[0])
    return look


def test_full_backward(slept):
    stage = EmulatedStage(WORK, index=0, layers=HALVES)
    hidden = stage(None, {})
    assert slept() == 3.0
    hidden.sum().backward()
    assert slept() == 3 * 6.0
    assert [p.grad.item() for p in stage.parameters()] == [1.0] * 3


@pytest.mark.parametrize("index", [0, 1])
def test_split_backward(slept, index):
    stage = EmulatedStage(WORK, index=index, layers=HALVES)
    hidden = None if index == 0 else torch.zeros(1, 16, requires_grad=True)
    split = SplitBackward(stage)
    output, saved = split.forward(lambda: stage(hidden, {}, torch.tensor(2.0)), hidden)
    slept()
    below = split.input_backward(saved, torch.ones_like(output))
    assert slept() == 3 * 2.0
    assert index == 0 or below.flatten()[0] == 0.5
    split.weight_backward(saved)
    assert slept() == 3 * 4.0
    assert [p.grad.item() for p in stage.parameters()] == [1.0] * 3


def test_torchs_split(slept):
    layers = nn.Sequential(*(EmulatedLayer(WORK) for _ in range(3)))
    hidden = torch.zeros(1, 16, requires_grad=True)
    output = layers(hidden)
    slept()
    _, groups = stage_backward_input([output], [torch.ones_like(output)], [hidden], layers.parameters())
    assert slept() == 3 * 2.0
    stage_backward_weight(layers.parameters(), groups)
    assert slept() == 3 * 4.0
    assert [p.grad.item() for p in layers.parameters()] == [1.0] * 3


def test_nothing_is_copied():
    hidden = torch.zeros(1, 16, requires_grad=True)
    assert EmulatedLayer(EmulatedWork(forward_s=0.0))(hidden).data_ptr() == hidden.data_ptr()


def test_pause_ends_after_its_deadline():
    start = emulation.perf_counter()
    emulation.pause(0.003)
    assert emulation.perf_counter() - start >= 0.003


def test_costs():
    costs = WORK.costs(num_layers=6, num_stages=2)
    assert [s.forward_s for s in costs.stages] == [3.0, 3.0]
    assert costs.stages[0].output_bytes == 64
    with pytest.raises(ValueError, match="layers=7: not a multiple of 2 virtual stages"):
        WORK.costs(num_layers=7, num_stages=2)
