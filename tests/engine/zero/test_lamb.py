"""LAMB equals a reference, whole and in fragments."""

import pytest
import torch

from tests.engine.zero.reference_lamb import ReferenceLamb
from weft.engine.zero import Lamb

SETTINGS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6}


def weights(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, 3), (7,), (2, 2, 4), (1,)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    made[1].zero_()  # a norm of 0 has a ratio of 1
    made[3].mul_(1e4)  # and the ratio has a bound
    return [weight.to(dtype) for weight in made]


def groups(tensors):
    return [{"params": tensors[:2], "weight_decay": 0.1}, {"params": tensors[2:], "weight_decay": 0.0}]


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(w.shape, generator=generator, dtype=torch.float64).to(dtype) for w in weights(dtype)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_whole_parameters(dtype, tolerance):
    ours, theirs = weights(dtype), weights(dtype)
    optimizer, reference = Lamb(groups(ours), **SETTINGS), ReferenceLamb(groups(theirs), **SETTINGS)
    for step in range(10):
        for mine, other, gradient in zip(ours, theirs, gradients(step, dtype), strict=True):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def test_fragments_share_their_norms():
    """Two halves of each parameter, stepped by two optimisers that meet in every sum."""
    whole = weights(torch.float32)
    halves = [
        [w.flatten()[: w.numel() // 2].clone() for w in whole],
        [w.flatten()[w.numel() // 2 :].clone() for w in whole],
    ]
    reference = ReferenceLamb(groups(whole), **SETTINGS)
    optimizers = [Lamb(groups(half), **SETTINGS) for half in halves]
    sums: list[torch.Tensor] = []
    for optimizer, half in zip(optimizers, halves, strict=True):
        places = {tensor: number for number, tensor in enumerate(half)}
        optimizer.join(places, len(half), sums.append, torch.device("cpu"))
    for step in range(5):
        for number, gradient in enumerate(gradients(step, torch.float32)):
            whole[number].grad = gradient
            cut = gradient.numel() // 2
            halves[0][number].grad, halves[1][number].grad = gradient.flatten()[:cut], gradient.flatten()[cut:]
        reference.step()
        step_together(optimizers)
        for number, weight in enumerate(whole):
            found = torch.cat([halves[0][number], halves[1][number]])
            torch.testing.assert_close(found, weight.flatten(), rtol=1e-5, atol=1e-6)


def step_together(optimizers):
    """Step in threads that wait for each other in the sum, as ranks do."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    barrier, parts = threading.Barrier(len(optimizers)), []
    lock = threading.Lock()

    def add_up(tensor):
        with lock:
            parts.append(tensor.clone())
        barrier.wait(10)
        tensor.copy_(sum(parts[: len(optimizers)]))
        barrier.wait(10)

    for optimizer in optimizers:
        optimizer._sum = add_up
    with ThreadPoolExecutor(len(optimizers)) as pool:
        list(pool.map(Lamb.step, optimizers))


def test_settings_that_are_not_given_are_those_of_adam_and_deepspeeds_bounds():
    (group,) = Lamb([torch.nn.Parameter(torch.ones(2))]).param_groups
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).defaults
    assert {name: group[name] for name in ("lr", "betas", "eps")} == {
        name: adam[name] for name in ("lr", "betas", "eps")
    }
    assert (group["weight_decay"], group["min_coeff"], group["max_coeff"]) == (0.0, 0.01, 10.0)


def test_a_group_may_stand_still_while_another_learns():
    ours = weights(torch.float64)
    before = [weight.clone() for weight in ours]
    resting, learning = groups(ours)
    optimizer = Lamb([resting | {"lr": 0.0}, learning], **SETTINGS)
    for mine, gradient in zip(ours, gradients(0, torch.float64), strict=True):
        mine.grad = gradient
    optimizer.step()
    moved = [not torch.equal(mine, old) for mine, old in zip(ours, before, strict=True)]
    assert moved == [False, False, True, True]


def test_no_sum_is_asked_for_where_nothing_is_to_be_updated():
    ours, sums = weights(torch.float64), []
    optimizer = Lamb(ours, **SETTINGS | {"lr": 0.0})
    optimizer.join({tensor: number for number, tensor in enumerate(ours)}, 4, sums.append, torch.device("cpu"))
    for mine, gradient in zip(ours, gradients(0, torch.float64), strict=True):
        mine.grad = gradient
    optimizer.step()
    assert not sums and all(optimizer.state[weight]["step"] == 1 for weight in ours)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert [each.shape for each in sums] == [(4, 2)]
