"""Tests of the memory of a rank's weights, gradients and moments: by hand, and against what replicas share."""

import pytest

from weft.conf.schema import Precision, ZeroConfig
from weft.pipeline.memory import USABLE, RankMemory, ZeroMemory, zero_memory

N, BLOCK, BUCKET = 1200, 100, 150
"""Parameters of a rank, of its largest block, and of a bucket."""
FP32, BF16 = Precision.fp32, Precision.bf16


def memory(stage, *, replicas=4, precision=BF16, microbatches=8, parameters=N, share=None, **zero):
    settings = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": 10 * BUCKET} | zero
    return zero_memory(
        parameters,
        ZeroConfig(stage=stage, **settings),
        precision,
        replicas,
        largest_block=BLOCK,
        microbatches=microbatches,
        share=share,
    )


SHARE = N // 4
WHOLE_BUFFERS = 2 * BUCKET * 4
BLOCK_BUFFERS = BLOCK * (2 + 4)
"""At ZeRO-3: gathered weights, and gradients."""
ALL = {"param_persistence_threshold": 0}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # In fp32 weights are their own masters: 4 + 4 + 8 bytes, in 16 bits 2 + 4 + 12.
        (memory(0, precision=FP32), (4 * N, 4 * N, 8 * N, 0)),
        (memory(0), (2 * N, 4 * N, 12 * N, 0)),
        (memory(0, precision=Precision.fp16), (2 * N, 4 * N, 12 * N, 0)),
        (memory(1), (2 * N, 4 * N, 12 * SHARE, WHOLE_BUFFERS)),
        (memory(1, precision=FP32), (4 * N, 4 * N, 8 * SHARE, WHOLE_BUFFERS)),
        # Gradients that are added up over micro-batches are whole until the last.
        (memory(2), (2 * N, 4 * N, 12 * SHARE, WHOLE_BUFFERS)),
        (memory(2, microbatches=1), (2 * N, 4 * (SHARE + 2 * BLOCK), 12 * SHARE, WHOLE_BUFFERS)),
        # A sum of earlier micro-batches waits for the next one.
        (memory(2, reduce_every=1), (2 * N, 4 * (2 * SHARE + 2 * BLOCK), 12 * SHARE, WHOLE_BUFFERS)),
        (memory(2, reduce_every=2), (2 * N, 4 * (2 * SHARE + N), 12 * SHARE, WHOLE_BUFFERS)),
        (memory(2, reduce_every=4), (2 * N, 4 * (SHARE + N), 12 * SHARE, WHOLE_BUFFERS)),
        (memory(3, reduce_every=1, **ALL), (2 * (SHARE + 200), 4 * 2 * SHARE, 12 * SHARE, BLOCK_BUFFERS)),
        (memory(1, microbatches=1), (2 * N, 4 * N, 12 * SHARE, WHOLE_BUFFERS)),
        # Of weights that are gathered block by block two blocks are there; buckets are of one block.
        (memory(3, param_persistence_threshold=0), (2 * (SHARE + 200), 4 * N, 12 * SHARE, BLOCK_BUFFERS)),
        (
            memory(3, param_persistence_threshold=0, microbatches=1),
            (2 * (SHARE + 200), 4 * (SHARE + 200), 12 * SHARE, BLOCK_BUFFERS),
        ),
        # Parameters that are small enough stay whole, and have no shard.
        (
            memory(3, param_persistence_threshold=BLOCK + 1, model_persistence_threshold=70),
            (2 * (SHARE * (N - 70) / N + 270), 4 * N, 12 * SHARE, BLOCK_BUFFERS),
        ),
        (
            memory(3, param_persistence_threshold=BLOCK, model_persistence_threshold=70),
            (2 * (SHARE + 200), 4 * N, 12 * SHARE, BLOCK_BUFFERS),
        ),
        (
            memory(3, param_persistence_threshold=BLOCK + 1, model_persistence_threshold=10**9),
            (2 * N, 4 * N, 12 * SHARE, BLOCK_BUFFERS),
        ),
        (memory(3, parameters=160, param_persistence_threshold=0), (2 * (40 + 160), 4 * 160, 12 * 40, BLOCK_BUFFERS)),
        # A bucket is never more than there is, or than the smaller limit.
        (memory(1, parameters=80), (2 * 80, 4 * 80, 12 * 20, 2 * 80 * 4)),
        (memory(1, allgather_bucket_size=90), (2 * N, 4 * N, 12 * SHARE, 2 * 90 * 4)),
        # No rank to share with.
        *(
            (memory(stage, replicas=1, microbatches=1, param_persistence_threshold=0), (2 * N, 4 * N, 12 * N, 0))
            for stage in range(4)
        ),
        # Parameters with fewer holders than others.
        (memory(1, share=500), (2 * N, 4 * N, 12 * 500, WHOLE_BUFFERS)),
        (memory(2, share=500, microbatches=1), (2 * N, 4 * 700, 12 * 500, WHOLE_BUFFERS)),
        (memory(3, share=500, param_persistence_threshold=0), (2 * 700, 4 * N, 12 * 500, BLOCK_BUFFERS)),
    ],
)
def test_bytes_by_stage(found, expected):
    assert (found.weights, found.gradients, found.optimizer, found.buffers) == expected
    assert found.resident == sum(expected[:3]) and found.total == sum(expected)


STATES = ZeroMemory(weights=10.0, gradients=20.0, optimizer=30.0, buffers=7.0)


@pytest.mark.parametrize(
    ("more", "total"),
    [
        ({}, 60 + 7),
        ({"activations": 5.0}, 60 + 7),
        ({"activations": 5.0, "working": 3.0}, 60 + 8),
        ({"activations": 5.0, "working": 1.0, "concurrent_buffers": 4.0}, 60 + 10),
        ({"activations": 5.0, "stepping": 11.0}, 60 + 11),
    ],
)
def test_the_most_at_any_time_is_of_what_is_there_together(more, total):
    assert RankMemory(**{"zero": STATES, "activations": 0.0} | more).total == total


def test_a_plan_leaves_some_of_a_device_to_others():
    assert 0.7 <= USABLE <= 0.9


def test_room_is_what_activations_may_still_take():
    held = RankMemory(zero=STATES, activations=5.0, working=3.0, concurrent_buffers=2.0, stepping=7.0)
    assert held.headroom(100.0) == 100 - 60 - 10
    assert RankMemory(zero=STATES, activations=5.0, stepping=50.0).headroom(100.0) < 0, "an optimiser step does not"
    assert held.headroom(67.0) == 67 - 60 - 10 < 0, "states fit, a micro-batch does not"
    assert held.headroom(66.0) == 66 - 67, "states alone do not"
