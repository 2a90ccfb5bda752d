"""A split backward whose products run on several threads: two strands of one stage, and recomputed layers."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.engine.backward.bag import Bag, collect
from weft.engine.backward import SplitBackward


class Gate(nn.Module):
    """Where a strand hands over to the other."""

    def __init__(self):
        super().__init__()
        self.of_thread = {}

    def forward(self, x):
        self.of_thread.get(threading.current_thread().name, lambda: None)()
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["F", "I"])
@pytest.mark.parametrize("split_forward", [True, False])
def test_strands_of_one_stage_keep_their_products_apart(reentrant, first, split_forward):
    """A forward of one micro-batch and an input gradient of another take turns inside of their layers."""
    torch.manual_seed(0)
    gate = Gate()
    layer = nn.Sequential(nn.Linear(4, 4), gate, nn.Linear(4, 4), nn.Tanh())
    run = lambda x: checkpoint(layer, x, use_reentrant=reentrant)  # noqa: E731
    inputs = [torch.randn(3, 4), torch.randn(3, 4)]
    for x in inputs:
        layer(x.clone()).square().sum().backward()
    expected = collect(layer)

    split = SplitBackward(layer)
    xs = [x.clone().requires_grad_() for x in inputs]
    output, older = split.forward(lambda: run(xs[0]), xs[0])
    begun = {name: threading.Event() for name in "FI"}
    ended = threading.Event()
    results = {}

    def turn(name, other):
        def hand_over():
            begun[name].set()
            assert begun[other].wait(10)
            assert name == first or ended.wait(10)  # neither is inside of the other

        return hand_over

    def strand(name, work):
        if name != first:
            assert begun[first].wait(10)
        results[name] = work()
        if name == first:
            ended.set()

    work = {
        "F": lambda: split.forward(lambda: layer(xs[1]), xs[1], split=split_forward),
        "I": lambda: split.input_backward(older, 2 * output.detach()),
    }
    threads = []
    for name, other in ("FI", "IF"):
        gate.of_thread[name] = turn(name, other)
        threads.append(threading.Thread(target=strand, args=(name, work[name]), name=name))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(results) == {"F", "I"}
    gate.of_thread.clear()
    newer_output, newer = results["F"]
    assert all(p.grad is None for p in layer.parameters()), "products that were to wait have not"
    split.weight_backward(older)
    (split.input_backward if split_forward else split.full_backward)(newer, 2 * newer_output.detach())
    if split_forward:
        split.weight_backward(newer)
    for name, gradient in collect(layer).items():
        torch.testing.assert_close(gradient, expected[name])


class _OnAThreadOfItsOwn(torch.autograd.Function):
    """Recomputes a module in the backward on another thread, as autograd's thread of a device does."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        found = []

        def recompute():
            again = x.detach().requires_grad_()
            with torch.enable_grad():
                output = ctx.module(again)
            output.backward(gradient)
            found.append(again.grad)

        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()
        return found[0], None


class _Recomputed(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return _OnAThreadOfItsOwn.apply(x, self.module)


def test_products_recomputed_on_another_thread_are_deferred_too():
    plain = Bag("linear")
    split = SplitBackward(_Recomputed(copy.deepcopy(plain)))
    module = split._module.module
    x = torch.randn(2, 3, 6)
    plain(x).sum().backward()
    leaf = x.clone().requires_grad_()
    output, saved = split.forward(lambda: split._module(leaf).sum(), leaf, split=True)
    split.input_backward(saved, torch.ones_like(output))
    assert module.weight.grad is None
    split.weight_backward(saved)
    torch.testing.assert_close(module.weight.grad, plain.weight.grad)


def test_a_thread_that_computes_nothing_records_nothing():
    split = SplitBackward(Bag("linear"))
    x = torch.randn(2, 3, 6)
    found = []

    def other():
        split._module(x).sum().backward()
        found.append(split._module.weight.grad.clone())

    leaf = x.clone().requires_grad_()
    output, saved = split.forward(lambda: split._module(leaf).sum(), leaf, split=True)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found[0].abs().sum() > 0
    split.full_backward(saved, torch.ones_like(output))
    torch.testing.assert_close(split._module.weight.grad, 2 * found[0])
