"""Memory of received tensors is taken again, but never while anything can see it."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.channel import TensorSpec
from weft.comm.wan.staging import LEAST_BYTES, ReusedMemory


def spec(num_bytes):
    return TensorSpec((num_bytes,), torch.uint8)


def test_memory_is_taken_again_when_the_last_view_of_it_is_gone():
    memory = ReusedMemory()
    first = memory.tensor(spec(LEAST_BYTES))
    place, part = first.data_ptr(), first[5:7]
    del first
    second = memory.tensor(spec(LEAST_BYTES))
    assert second.data_ptr() != place
    del part
    assert memory.tensor(spec(LEAST_BYTES)).data_ptr() == place


def test_what_autograd_keeps_is_in_use():
    memory = ReusedMemory()
    received = memory.tensor(TensorSpec((256, 256), torch.float32)).fill_(2.0).requires_grad_()
    weight = torch.ones(256, 256, requires_grad=True)
    out = (received @ weight).sum()
    del received
    memory.tensor(TensorSpec((256, 256), torch.float32)).fill_(7.0)
    out.backward()
    assert torch.equal(weight.grad, torch.full((256, 256), 512.0))


def test_shapes_types_and_small_tensors():
    memory = ReusedMemory()
    specs = ((3, 1 << 16), torch.bfloat16), ((0, 4), torch.float32), ((), torch.int64), ((9,), torch.bool)
    for shape, dtype in specs:
        tensor = memory.tensor(TensorSpec(shape, dtype))
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        tensor.zero_()


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from("++-"), st.integers(1, 6)), max_size=60))
def test_no_two_tensors_overlap_and_no_more_is_held_than_was_in_use_at_once(steps):
    memory, held, most = ReusedMemory(), [], 0
    for what, units in steps:
        if what == "+":
            held.append(memory.tensor(spec(units * LEAST_BYTES)))
        elif held:
            held.pop(units % len(held))
        most = max(most, sum(tensor.nbytes for tensor in held))
        spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert memory.num_bytes <= most
    held.clear()
    memory.close()
    assert memory.num_bytes == 0
