"""The split backward's own rules: what waits, what is kept, which hooks run."""

import copy
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from tests.engine.backward.bag import WAYS, Bag, collect
from weft.engine.backward import SplitBackward


def run_split(module, x, **options):
    split = SplitBackward(module)
    x = x.detach().requires_grad_()
    output, saved = split.forward(lambda: module(x), x, **options)
    return split, saved, output


@given(
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    bias=st.booleans(),
    recompute=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_chain_of_products(ways, shape, bias, recompute):
    torch.manual_seed(0)
    # In float64: sums over a chain of such matrices grow until float32 shows the order in which they were taken.
    chain = nn.Sequential(*(Bag(way, bias=bias) for way in ways)).double()
    run = (lambda x: checkpoint(chain, x, use_reentrant=False)) if recompute else chain
    x = torch.randn(*shape, 6, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    out = run(plain)
    seed = torch.randn_like(out)
    out.backward(seed)
    want = collect(chain)
    split = SplitBackward(chain)
    leaf = x.clone().requires_grad_()
    output, saved = split.forward(lambda: run(leaf), leaf)
    assert torch.equal(output, out)
    torch.testing.assert_close(split.input_backward(saved, seed), plain.grad)
    split.weight_backward(saved)
    torch.testing.assert_close(collect(chain), want)


def test_plain_forward_is_plain_autograd():
    module = nn.Linear(4, 4)
    split, saved, output = run_split(module, torch.randn(3, 4), split=False)
    assert output.grad_fn.name() == "AddmmBackward0"
    split.full_backward(saved, torch.ones_like(output))
    assert module.weight.grad is not None
    assert saved.live_bytes == 0


def test_nothing_is_kept_for_a_frozen_weight():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    split, saved, output = run_split(module, torch.randn(3, 4))
    split.input_backward(saved, torch.ones_like(output))
    assert saved.kept_bytes == 2 * 3 * 4 * 4  # activation and gradient of the second layer
    split.weight_backward(saved)
    assert saved.tape.kept_bytes == saved.live_bytes == 0
    assert module[0].weight.grad is None
    assert module[1].bias.grad.tolist() == [3.0] * 4


def test_a_shared_activation_is_counted_once():
    class Fan(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.q(x) * self.k(x)

    split, saved, output = run_split(Fan(), torch.randn(5, 8))
    assert saved.activation_bytes == 3 * 5 * 8 * 4  # x, q(x), k(x)
    split.input_backward(saved, torch.ones_like(output))
    assert saved.kept_bytes == 3 * 5 * 8 * 4  # x and the gradients of q(x) and k(x)
    assert saved.live_bytes == saved.kept_bytes


def test_a_sparse_matrix_is_counted_by_its_parts():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return torch.sparse_coo_tensor([[0, 1], [2, 3]], self.values, (4, 4)) @ x

    module, x = Sparse(), torch.arange(12.0).view(4, 3)
    split, saved, output = run_split(module, x)
    assert saved.activation_bytes >= 2 * 2 * 8 + 2 * 4  # indices and values
    split.input_backward(saved, torch.ones_like(output))
    split.weight_backward(saved)
    assert module.values.grad.tolist() == [6.0 + 7 + 8, 9.0 + 10 + 11]


def test_a_stage_without_matrices_has_an_empty_w():
    module = nn.LayerNorm(4)
    split, saved, output = run_split(module, torch.randn(3, 4))
    split.input_backward(saved, torch.ones_like(output))
    assert module.weight.grad is not None
    assert saved.kept_bytes == 0
    split.weight_backward(saved)


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.5}, {"sparse": True}])
def test_a_lookup_waits_unless_it_changes_its_weight_or_has_a_sparse_gradient(options):
    table, ids = nn.Embedding(8, 4, **options), torch.tensor([1, 2, 1])
    split = SplitBackward(table)
    output, saved = split.forward(lambda: table(ids), None)
    split.input_backward(saved, torch.ones_like(output))
    assert (table.weight.grad is None) == (not options)
    split.weight_backward(saved)
    assert table.weight.grad.to_dense().sum(dim=1).tolist() == [0, 8, 4, 0, 0, 0, 0, 0]


def test_what_cannot_wait_is_said_once(caplog):
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with caplog.at_level(logging.INFO, logger="weft"):
        split, _, _ = run_split(module, torch.randn(3, 4))
        split.forward(lambda: module(torch.randn(3, 4)), None)
    assert split.unsplit == ("1.weight", "1.bias")
    assert [r.getMessage() for r in caplog.records] == ["gradients computed in I instead of W: 1.weight, 1.bias"]


def test_each_hook_runs_once_per_parameter_and_microbatch():
    shared = nn.Linear(4, 4, bias=False)
    module = nn.Sequential(shared, shared)
    seen = []
    shared.weight.register_hook(lambda grad: seen.append(("tensor", grad.clone())))
    shared.weight.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad.clone())))
    split, saved, output = run_split(module, torch.randn(3, 4))
    split.input_backward(saved, torch.ones_like(output))
    assert seen == []
    split.weight_backward(saved)
    assert [name for name, _ in seen] == ["tensor", "accumulated"]
    assert torch.equal(seen[1][1], shared.weight.grad)


def test_microbatches_wait_side_by_side():
    module = nn.Linear(4, 4)
    split = SplitBackward(module)
    inputs = [torch.randn(3, 4) for _ in range(3)]
    saved = [split.forward(lambda x=x: module(x), None) for x in inputs]
    for output, one in saved:
        split.input_backward(one, torch.ones_like(output))
    for _, one in reversed(saved):
        split.weight_backward(one)
    torch.testing.assert_close(module.weight.grad, torch.ones(4, 3) @ sum(inputs))


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_an_embedding_waits(padding_idx, by_frequency):
    module = nn.Embedding(7, 4, padding_idx=padding_idx, scale_grad_by_freq=by_frequency)
    ids = torch.tensor([[0, 1, 1], [6, 6, 2]])
    seed = torch.randn(2, 3, 4)
    module(ids).backward(seed)
    want = collect(module)
    split = SplitBackward(module)
    _, saved = split.forward(lambda: module(ids), None)
    assert split.input_backward(saved, seed) is None
    assert module.weight.grad is None
    split.weight_backward(saved)
    torch.testing.assert_close(collect(module), want, rtol=0, atol=0)


def test_autocast_is_left_alone():
    module = nn.Linear(4, 4)
    split = SplitBackward(module)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output, saved = split.forward(lambda: module(x), None)
    split.full_backward(saved, torch.ones_like(output))
    assert split.unsplit == ("weight", "bias")
    assert module.weight.grad.dtype == torch.float32


def test_no_graph_without_gradients():
    module = nn.Linear(4, 4)
    SplitBackward(module)
    with torch.no_grad():
        assert not module(torch.randn(3, 4)).requires_grad


def test_an_exception_in_the_forward_leaves_no_mode_behind():
    module = nn.Linear(4, 4)
    split = SplitBackward(module)
    with pytest.raises(RuntimeError):
        split.forward(lambda: module(torch.randn(3, 5)), None)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_remove_and_copy():
    module = nn.Linear(4, 4)
    split = SplitBackward(module)
    twin = copy.deepcopy(module)
    split.remove()
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert twin(torch.randn(3, 4)).grad_fn.name() == "AddmmBackward0"


def test_gradients_equal_those_of_torchs_graph_partition():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    seed = torch.randn_like(out)
    (below,), groups = stage_backward_input([out], [seed], [leaf], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    want = collect(module)
    split, saved, _ = run_split(module, x)
    torch.testing.assert_close(split.input_backward(saved, seed), below)
    split.weight_backward(saved)
    torch.testing.assert_close(collect(module), want)


@pytest.mark.parametrize("split", [False, True])
def test_a_full_backward_returns_the_input_gradient(split):
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    plain = x.clone().requires_grad_()
    out = module(plain)
    seed = torch.randn_like(out)
    out.backward(seed)
    want = collect(module)
    owner = SplitBackward(module)
    leaf = x.clone().requires_grad_()
    _, saved = owner.forward(lambda: module(leaf), leaf, split=split)
    torch.testing.assert_close(owner.full_backward(saved, seed), plain.grad)
    torch.testing.assert_close(collect(module), want)


class Tokens(nn.Module):
    """As experts do: one parameter, a product with a part of it for each of some choices."""

    def __init__(self, choices):
        super().__init__()
        self.choices = choices
        self.weight = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x):
        return sum(F.linear(x, self.weight[choice]) for choice in self.choices)


def recomputed(module, use_reentrant):
    def run(x):
        return checkpoint(module, x, use_reentrant=use_reentrant)

    return run


RUNS = {
    "": lambda module: module,
    "recomputed": lambda module: recomputed(module, use_reentrant=False),
    "recomputed reentrantly": lambda module: recomputed(module, use_reentrant=True),
}


@pytest.mark.parametrize("way", RUNS)
@pytest.mark.parametrize("first", [1, 3])
def test_weight_gradients_can_be_played_one_parameter_at_a_time(way, first):
    """Some inside of the backward, as soon as they are ready; each once, with the numbers of all at once."""
    shared = nn.Linear(6, 6)
    module = nn.Sequential(Tokens([2, 0, 2]), nn.Tanh(), shared, nn.Tanh(), nn.Linear(6, 6, bias=False), shared)
    x, seed = torch.randn(3, 6), torch.randn(3, 6)
    split, saved, _ = run_split(module, x)
    split.full_backward(saved, seed)
    want = collect(module)
    split.remove()
    accumulated = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(accumulated.append)

    played = []
    module[1].register_full_backward_hook(lambda *_: played.extend(saved.tape.play() for _ in range(first)))
    split = SplitBackward(module)
    hidden = x.clone().requires_grad_()
    _, saved = split.forward(lambda: RUNS[way](module)(hidden), hidden)
    split.input_backward(saved, seed)
    assert played == ([True, True, False] if first == 3 else [True])  # the shared one, and the one before it
    left = 3 - sum(played)
    assert [saved.tape.play() for _ in range(left + 1)] == [True] * left + [False]
    assert saved.tape.kept_bytes == 0
    split.weight_backward(saved)
    assert len(accumulated) == len(set(accumulated)) == 4  # the shared one has a bias
    found = collect(module)
    assert all(torch.equal(found[name], gradient) for name, gradient in want.items())


@pytest.mark.parametrize("played", range(4))
def test_nothing_is_left_to_play_after_what_was_not_played_is_computed_at_once(played):
    module = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    split, saved, output = run_split(module, torch.randn(2, 6))
    split.input_backward(saved, torch.ones_like(output))
    assert [saved.tape.play() for _ in range(played)] == [True] * played
    split.weight_backward(saved)
    first = collect(module)
    assert saved.tape.play() is False and saved.tape.kept_bytes == 0
    split.weight_backward(saved)
    assert all(p.grad is None for p in module.parameters()), "computed twice"
    assert all(gradient.abs().sum() > 0 for gradient in first.values())


def test_an_output_is_freed_while_its_backward_waits():
    """A pipeline sends it to the next stage. The backward needs the graph, and no more."""
    module = nn.Linear(4, 4)
    hidden = torch.ones(2, 4, requires_grad=True)
    for split in (False, True):
        backward = SplitBackward(module)
        output, saved = backward.forward(lambda: module(hidden) + 1, hidden, split=split)
        gone = weakref.ref(output)
        del output
        assert gone() is None and saved.holds_activation
        backward.full_backward(saved, torch.ones(2, 4))
        backward.remove()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 4.0))
