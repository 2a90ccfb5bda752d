"""The accumulation of received gradients: a Triton kernel next to torch, and the norm that it sums on the way."""

import json
import os

import pytest
import torch
from torch.optim import SGD

from tests.engine.zero.replicas import in_threads
from tests.engine.zero.test_replicas import Replica
from tests.interpreter import python
from weft.conf.schema import ZeroConfig
from weft.engine.zero import bucket
from weft.engine.zero.kernels.accumulation import accumulate, accumulate_plain

EXACT = 3e-7
"""Relative difference of a sum of squares in fp32 from float64's."""


def test_the_interpreted_kernel_equals_torch():
    """Any length, misaligned views, all formats, numbers that are not finite; indices beyond 2**31."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = python("-m", "tests.engine.zero.interpreted_accumulation", env=environment)
    assert done.returncode == 0, done.stderr
    *cases, last = map(json.loads, done.stdout.splitlines())
    assert len(cases) == 6 * 3 * 2 * 2 + 3 * 2 * 2 + 1
    assert not [case for case in cases if not (case["bits"] and case["off"] < EXACT)]
    first = ((1 << 31) // 64 * 3 + 1) * 64
    assert first > 1 << 32 and last["elements"] == list(range(first, first + 64))


@pytest.mark.gpu(shows="the accumulation kernel gives torch's bits, and the sum of squares, at the sizes of buckets")
@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 50_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adds", [False, True])
def test_the_compiled_kernel_equals_torch(length, dtype, adds):
    pytest.importorskip("triton")
    from weft.engine.zero.kernels.accumulation_triton import accumulate_fused

    if torch.version.cuda is None:
        length = min(length, 10_000)  # an emulated device interprets kernels
    generator = torch.Generator("cuda").manual_seed(0)
    received = torch.randn(length, generator=generator, device="cuda").to(dtype)
    shard = torch.randn(length, generator=generator, device="cuda")
    for value in (1.0, float("nan"), float("inf")):
        received[-1:] = value
        plain, fused = shard.clone(), shard.clone()
        accumulate_plain(plain, received, adds=adds)
        squares = accumulate_fused(fused, received, adds=adds)
        torch.testing.assert_close(fused, plain, rtol=0, atol=0, equal_nan=True)
        exact = plain.double().square().sum()
        torch.testing.assert_close(squares.double().sum(), exact, rtol=EXACT, atol=0, equal_nan=True)


def test_on_a_cpu_torch_accumulates():
    shard = torch.ones(4)
    assert accumulate(shard, torch.full((4,), 2.0, dtype=torch.bfloat16), adds=True) is None
    assert shard.tolist() == [3.0] * 4


def accumulate_like_the_kernel(shard, received, *, adds):
    accumulate_plain(shard, received, adds=adds)
    return torch.stack([part.square().sum() for part in shard.split(7)])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduce_every", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_that_are_summed_on_the_way_clip_alike(stage, reduce_every, tied, monkeypatch):
    def trained():
        def run(meeting, number):
            zero = ZeroConfig(stage=stage, reduce_every=reduce_every)
            replica = Replica(meeting, number, zero, lambda p: SGD(p, lr=0.1), clip=0.5, tied=tied)
            norms = [replica.step(step) for step in range(3)]
            return norms, replica.weights()

        return in_threads(2, run)

    expected = trained()
    calls = []
    monkeypatch.setattr(bucket, "accumulate", lambda *a, **k: calls.append(a) or accumulate_like_the_kernel(*a, **k))
    found = trained()
    assert bool(calls) == (stage >= 2 and reduce_every == 1)
    for (norms, weights), (others, other) in zip(found, expected, strict=True):
        assert norms == pytest.approx(others, rel=1e-6)
        torch.testing.assert_close(weights, other, rtol=1e-6, atol=1e-8)
