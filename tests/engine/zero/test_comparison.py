"""A bit that flips in one replica is found, and the replica is named."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.zero.flipped import trained_with_a_flip
from weft.engine.zero.comparison import Comparison, checksum, differing
from weft.tools.ranks import run_ranks


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.uint8]),
    st.integers(1, 300),
    st.integers(0, 2**32),
    st.data(),
)
def test_any_flipped_bit_changes_the_checksum(dtype, numel, seed, data):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    before = checksum(tensor)
    assert before == checksum(tensor.clone().view(1, -1))
    bits = torch.frombuffer(bytearray(tensor.view(torch.uint8).numpy().tobytes()), dtype=torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(bits.view(dtype)) != before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0])
def test_what_is_no_number_counts_as_bits(value):
    one, other = torch.full((3, 5), value), torch.full((3, 5), value)
    assert checksum(one) == checksum(other) != checksum(torch.zeros(3, 5))
    assert checksum(torch.zeros(0)) == 0


@given(st.integers(0, 9), st.integers(0, 20))
def test_a_part_of_a_larger_tensor(start, numel):
    whole = torch.randn(40, generator=torch.Generator().manual_seed(start))
    part = whole[start : start + numel]
    before = checksum(part)
    for index in range(start, start + numel):
        whole.view(torch.int32)[index] ^= 1 << 30
        assert checksum(part) != before
        whole.view(torch.int32)[index] ^= 1 << 30
    whole[:start], whole[start + numel :] = 0, 0
    assert checksum(part) == before


def test_the_largest_sum_wraps():
    ones = torch.full((1 << 20,), -1, dtype=torch.int32).view(torch.float32)
    assert int(checksum(ones)) == -(1 << 19)
    assert int(checksum(torch.full((4,), 2**62, dtype=torch.int64))) == int(np.int64(0))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7))
def test_who_differs_is_who_is_not_of_the_majority(values):
    found = differing(values)
    counts = {value: values.count(value) for value in values}
    most = [value for value, count in counts.items() if 2 * count > len(values)]
    if most:
        assert found == tuple(i for i, value in enumerate(values) if value != most[0])
    else:
        assert found == tuple(range(len(values)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "stages", "zero", "where", "said", "done"),
    [
        (3, 1, 0, "weight", "after step 5: replicas differ: rank 1 in {name}", 8),
        (3, 1, 0, "state", "after step 5: replicas differ: rank 1 in {name}", 8),
        (4, 2, 1, "weight", "ranks 2, 3 do not agree in {name}, and no majority says which of them is wrong", 8),
        (3, 1, 2, "weight", "after step 5: replicas differ: rank 1 in {name}", 8),
        (3, 1, 0, "saved", "after step 5: replicas differ: rank 1 in {name}", 5),
    ],
)
def test_a_flipped_bit_is_found_and_its_replica_named(ranks, stages, zero, where, said, done):
    found = run_ranks(ranks, trained_with_a_flip, stages, zero, where, timeout_s=300)
    assert len({(text, step) for text, step, _, _ in found}) == 1, "every rank says so, after the same step"
    text, step, _, _ = found[0]
    name = next(name for _, _, name, _ in found if name)
    assert said.format(name=f"the optimiser's state of {name}" if where == "state" else name) in text
    assert "They were equal after step 3" in text and step == done
    assert all(losses == found[0][3] for *_, losses in found)


@pytest.mark.parametrize(
    ("replica", "table", "said"),
    [
        (0, [[1, 5], [1, 6], [1, 5], [1, 6]], ""),
        (1, [[1, 5], [1, 6], [1, 5], [1, 6]], ""),
        (0, [[1, 5], [1, 6], [1, 7], [1, 6]], "ranks 10, 12 do not agree in an expert, and no majority"),
        (1, [[1, 5], [1, 6], [1, 7], [1, 6]], ""),
        (1, [[2, 5], [1, 6], [1, 5], [1, 6]], "rank 10 in a norm"),
        (0, [[1, 5], [1, 6], [1, 5], [1, 6], [1, 4], [1, 6]], "rank 14 in an expert"),
    ],
)
def test_experts_are_compared_with_those_who_hold_the_same(replica, table, said):
    members = [SimpleNamespace(name=name, parameter=torch.zeros(1)) for name in ("a norm", "an expert")]
    sharding = SimpleNamespace(
        device=torch.device("cpu"),
        buckets=[SimpleNamespace(sharded=False, members=members)],
        is_shared_out=True,
    )
    ranks = range(10, 10 + len(table))
    comparison = Comparison(
        sharding, None, every=1, replica=replica, replicas=ranks, group=None, expert=2, experts={"an expert"}
    )
    found = comparison._describe(torch.tensor(table))
    assert found.text.startswith(said)
    assert bool(found.text) == bool(said)
    assert set(found.ranks) == {int(rank) for rank in re.findall(r"\d+", said)}


@pytest.mark.parametrize("bit", [0, 31, 32, 62, 63])
@pytest.mark.parametrize("which", range(4))
def test_any_bit_of_any_state_of_a_parameter_counts(which, bit):
    """The highest included, whatever factor tells one tensor from the next; which of them holds what counts, too."""
    tensors = [torch.arange(6, dtype=torch.float64) + 10 * number for number in range(4)]
    weight, *states = tensors
    parameter = torch.nn.Parameter(torch.zeros(6))
    fragment = SimpleNamespace(name="a norm", tensor=weight, parameter=parameter, trained=True)
    sharding = SimpleNamespace(
        device=torch.device("cpu"), buckets=[], is_shared_out=False, fragments=lambda: [fragment], settle=lambda: None
    )
    optimizer = SimpleNamespace(state={weight: dict(zip("abc", states, strict=True))})
    comparison = Comparison(sharding, optimizer, every=1, replica=0, replicas=(0, 1), group=None)
    assert comparison.names == ["the optimiser's state of a norm"]
    (before,) = comparison._checksums().tolist()
    tensors[which].view(torch.int64)[3] ^= -(1 << 63) if bit == 63 else 1 << bit
    (after,) = comparison._checksums().tolist()
    assert after != before
    other = tensors[which - 1]
    tensors[which][:], other[:] = other.clone(), tensors[which].clone()
    assert comparison._checksums().tolist() != [after]
