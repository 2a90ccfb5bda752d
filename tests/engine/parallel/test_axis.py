"""Axis groups in one process, and the functions over them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.parallel import functions
from weft.engine.parallel.axis import AxisGroups
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.in_process import run_in_threads


def full(shape=(2, 8, 3), seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_gathered_and_summed_are_the_whole_computation(size):
    """y = sum of members' parts of w x, on slices of x: values and gradients equal those of one rank."""
    x, w, weight = full(), full((4, 3), 1), full((2, 8, 4), 2)
    reference = x.clone().requires_grad_(), w.clone().requires_grad_()
    (torch.tanh(reference[0] @ reference[1].T) * weight).sum().backward()

    def member(groups: AxisGroups):
        group = groups.tensor
        mine, held = x.clone().requires_grad_(), w.clone().requires_grad_()
        slice_ = functions.take_slice(group, mine, 1)
        everywhere = functions.gather(group, slice_, 1)
        partial = everywhere @ held.T / size
        part = functions.scatter_sum(group, partial, 1)
        (torch.tanh(part) * weight.chunk(size, 1)[group.index]).sum().backward()
        return mine.grad, held.grad

    for number in range(2):
        total = sum(grads[number] for grads in run_in_threads({"tensor": size}, member))
        torch.testing.assert_close(total, reference[number].grad)


def test_members_of_several_axes_meet_their_own():
    def member(groups: AxisGroups):
        here = torch.tensor([10.0 * groups.context.index + groups.tensor.index])
        return [group.all_gather(here).wait().tolist() for group in (groups.context, groups.tensor)]

    assert run_in_threads({"context": 2, "tensor": 2}, member) == [
        [[0, 10], [0, 1]],
        [[1, 11], [0, 1]],
        [[0, 10], [10, 11]],
        [[1, 11], [10, 11]],
    ]


def test_rows_reach_the_member_that_they_are_for():
    def member(groups: AxisGroups):
        me = groups.expert.index
        send, receive = ([1, 2], [1, 2]) if me == 0 else ([2, 2], [2, 2])
        rows = torch.arange(sum(send)) + 100 * me
        return groups.expert.all_to_all(rows, send, receive).wait().tolist()

    assert run_in_threads({"expert": 2}, member) == [[0, 100, 101], [1, 2, 102, 103]]


def test_an_error_of_one_member_frees_the_others():
    def member(groups: AxisGroups):
        if groups.tensor.index:
            raise ValueError("mine")
        return groups.tensor.all_gather(torch.ones(1)).wait()

    with pytest.raises(ValueError, match="mine"):
        run_in_threads({"tensor": 2}, member)


def test_different_operations_of_members_raise_an_error():
    def member(groups: AxisGroups):
        group = groups.tensor
        return (group.all_reduce if group.index else group.all_gather)(torch.ones(2)).wait()

    with pytest.raises(RuntimeError, match=r"all_gather over the tensor axis, all_reduce"):
        run_in_threads({"tensor": 2}, member)


@given(
    count=st.integers(1, 4),
    blocks=st.integers(1, 3),
    length=st.integers(1, 3),
    others=st.lists(st.integers(1, 3), max_size=2),
    data=st.data(),
)
def test_the_parts_of_a_cut_are_the_tensor(count, blocks, length, others, data):
    dim = data.draw(st.integers(0, len(others)))
    shape = (*others[:dim], count * blocks * length, *others[dim:])
    tensor, again = full(shape), torch.full(shape, torch.nan, dtype=torch.float64)
    for index in range(count):
        cut = Cut(shape, dim, index, count, blocks)
        part = cut.take(tensor)
        assert tuple(part.shape) == cut.held_shape
        assert part.numel() == cut.num_elements
        cut.put(part, again)
    assert torch.equal(tensor, again)


def test_a_dimension_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"dimension 1 of a tensor \[4, 6\] cannot be divided into 2 x 2"):
        Cut((4, 6), 1, 0, 2, blocks=2)
