"""Attention to blocks of keys, merged: that of all keys at once, whatever the blocks, masks and numbers are."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.engine.parallel import blocks
from weft.engine.parallel.blocks import Block, GpuEfficient, GpuFlash, Plain, ProcessorFlash
from weft.engine.parallel.ring import _Merged

KERNELS = [Plain(), ProcessorFlash()]


def tensors(seed, heads=4, of_keys=2, queries=6, keys=10, width=8, of_values=8, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads, queries, width), (of_keys, keys, width), (of_keys, keys, of_values), (heads, queries, of_values)
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def merged_attention(kernel, query, key, value, gradient, scale, cuts, seen=None):
    """Output and gradients, block by block."""
    bounds = [0, *sorted(cuts), key.shape[2]]
    columns = [slice(start, end) for start, end in pairwise(bounds)]

    def block(part):
        bias = None
        if seen is not None:
            of_part = seen[..., part]
            bias = torch.zeros(of_part.shape, dtype=query.dtype, device=query.device)
            bias.masked_fill_(~of_part, blocks.unseen(query.dtype))
        return Block(query, key[:, :, part], value[:, :, part], scale, bias=bias)

    merged, length = _Merged(), query.shape[2]
    for part in columns:
        partial = kernel.forward(block(part))
        merged.add(partial, slice(0, length), length)
    output, sums = merged.settled(query.dtype, masked=seen is not None)
    found = [kernel.backward(block(part), gradient, output, sums, partial.seeds) for part in columns]
    of_key, of_value = (torch.cat([grads[which] for grads in found], 2) for which in (1, 2))
    return output, sum(grads[0] for grads in found), of_key, of_value


def whole_attention(query, key, value, gradient, scale, seen=None):
    """The same by torch, all at once; rows that see nothing are zero."""
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    output = nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen, scale=scale, enable_gqa=True)
    output.backward(gradient)
    return output.detach(), *(leaf.grad for leaf in leaves)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    cuts=st.sets(st.integers(1, 9), max_size=4),
    kernel=st.sampled_from(KERNELS),
    shared_by=st.sampled_from([1, 2, 4]),
    of_values=st.sampled_from([4, 8, 12]),
    masked=st.sampled_from([None, 0.2, 0.8]),
    stretch=st.sampled_from([1.0, 30.0]),
)
def test_blocks_make_the_whole(seed, cuts, kernel, shared_by, of_values, masked, stretch):
    """Random cuts; masks that hide much hide whole rows, and whole blocks of a row."""
    query, key, value, gradient = tensors(seed, of_keys=4 // shared_by, of_values=of_values)
    seen = None
    if masked is not None:
        seen = torch.rand(2, 1, 6, 10, generator=torch.Generator().manual_seed(seed)) >= masked
        seen[0, 0, 0] = False
    given_ = (query * stretch, key, value, gradient, 0.3)
    got, want = merged_attention(kernel, *given_, cuts, seen), whole_attention(*given_, seen)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_a_causal_block_shows_what_is_not_behind(kernel):
    query, key, value, gradient = tensors(1, queries=10)
    block = Block(query, key, value, 0.3, causal=True)
    seen = torch.ones(10, 10, dtype=torch.bool).tril()
    want = whole_attention(query, key, value, gradient, 0.3, seen)
    output, sums, seeds = kernel.forward(block)
    got = output, *kernel.backward(block, gradient, output, sums, seeds)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_numbers_of_few_bits_are_merged_in_more(kernel, dtype):
    """So merging many blocks loses no more than one block does."""
    query, key, value, gradient = tensors(2, keys=32, dtype=dtype)
    want = whole_attention(*(tensor.double() for tensor in (query, key, value, gradient)), 0.3)
    apart = merged_attention(kernel, query, key, value, gradient, 0.3, range(1, 32))
    at_once = merged_attention(kernel, query, key, value, gradient, 0.3, ())
    room = 4 * torch.finfo(dtype).eps
    for one, other, exact in zip(apart, at_once, want, strict=True):
        assert one.dtype == dtype
        off, least = ((found.double() - exact).abs().max() for found in (one, other))
        assert off <= 2 * least + room * exact.abs().max()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_a_number_is_not_hidden(kernel, bad):
    query, key, value, gradient = tensors(3)
    key[0, 0, 3, 0] = bad
    output, *_ = merged_attention(kernel, query, key, value, gradient, 0.3, (5,))
    spoilt = torch.zeros(2, 4, 6, dtype=torch.bool)  # an infinite key is never seen by a query that points away from it
    spoilt[0, :2] = math.isnan(bad) | (query[0, :2, :, 0] > 0)
    assert torch.equal(~output.isfinite().all(-1), spoilt)


@pytest.mark.parametrize(("kernel", "masked"), [(GpuFlash(), False), (GpuEfficient(), False), (GpuEfficient(), True)])
def test_what_gpus_are_asked_for_is_what_torch_offers(kernel, masked):
    """On the meta device, which has no numbers: names, arguments and shapes."""
    query, key, value, gradient = tensors(4, width=12, of_values=4, keys=9, dtype=torch.bfloat16, device="meta")
    bias = torch.zeros(2, 1, 6, 9, dtype=torch.bfloat16, device="meta") if masked else None
    block = Block(query, key, value, 0.3, bias=bias)
    output, sums, seeds = kernel.forward(block)
    assert output.shape == (2, 4, 6, 4) and sums.shape == (2, 4, 6) and sums.dtype == torch.float32
    found = kernel.backward(block, gradient, output, sums, seeds)
    assert [grads.shape for grads in found] == [query.shape, key.shape, value.shape]


def test_implementations_are_chosen_by_device_and_mask():
    query = torch.zeros(1, 1, 1, 8)
    assert blocks.kernel_for(query, masked=True) == ProcessorFlash()
    assert blocks.kernel_for(query.to("meta"), masked=False) == Plain()


@pytest.mark.gpu(shows="blocks of attention by torch's flash and memory-efficient kernels, merged")
@pytest.mark.parametrize("of_values", [64, 32])
@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        (GpuFlash(), torch.bfloat16, False),
        (GpuEfficient(), torch.bfloat16, True),
        (GpuEfficient(), torch.float32, True),
        (GpuEfficient(), torch.float32, False),
    ],
)
def test_blocks_make_the_whole_on_a_gpu(kernel, dtype, masked, of_values):
    given_ = tensors(5, queries=96, keys=200, width=64, of_values=of_values, dtype=dtype, device="cuda")
    seen = None
    if masked:
        seen = (torch.rand(2, 1, 96, 200, generator=torch.Generator().manual_seed(6)) < 0.3).cuda()
        seen[0, 0, 0] = False
    got = merged_attention(kernel, *given_, 0.1, (40, 72), seen)
    want = whole_attention(*(tensor.double() for tensor in given_), 0.1, seen)
    room = 8 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 2e-3  # fp32 products may run as TF32
    for one, other in zip(got, want, strict=True):
        assert (one.double() - other).abs().max() <= room * other.abs().max()
