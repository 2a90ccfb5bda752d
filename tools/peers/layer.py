"""What an emulated layer really takes on this machine, with all ranks at work."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from weft.engine.emulation import EmulatedLayer, EmulatedWork, emulated_hidden
from weft.tools.ranks import run_ranks

ROUNDS = 40
TIMEOUT_S = 120.0


def measure_layer(work: EmulatedWork, num_ranks: int) -> EmulatedWork:
    """``work`` with the times that plain autograd takes for it, on ``num_ranks`` ranks at once.

    A backward is measured as a whole; what it takes beyond its emulated time is shared evenly
    between the gradients of input and weight.
    """
    times = run_ranks(num_ranks, _forward_and_backward, work, timeout_s=TIMEOUT_S)
    forward_s, backward_s = (median(of_ranks) for of_ranks in zip(*times, strict=True))
    excess_s = (backward_s - work.input_s - work.weight_s) / 2
    return replace(work, forward_s=forward_s, input_s=work.input_s + excess_s, weight_s=work.weight_s + excess_s)


def _forward_and_backward(work: EmulatedWork) -> tuple[float, float]:
    """Medians of one rank."""
    layer, hidden = EmulatedLayer(work), emulated_hidden(work).requires_grad_()
    gradient = torch.ones_like(hidden)
    marks = []
    for _ in range(ROUNDS):
        start = perf_counter()
        output = layer(hidden)
        middle = perf_counter()
        output.backward(gradient)
        marks.append((middle - start, perf_counter() - middle))
        layer.zero_grad()
        hidden.grad = None
    forward_s, backward_s = zip(*marks, strict=True)
    return median(forward_s), median(backward_s)
