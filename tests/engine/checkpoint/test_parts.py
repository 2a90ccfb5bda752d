"""Tensors that are stored in parts are read whole, and in any other parts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.pieces import Piece, cut_tensors, overlap, stored_name, whole_name
from weft.engine.checkpoint.reader import open_checkpoint
from weft.engine.checkpoint.writer import save
from weft.engine.parallel.cut import Cut

SHAPE = (8, 16, 2)
CUTS = st.builds(
    lambda dim, count, blocks: (dim, count, blocks),
    st.integers(0, 1),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)


def parts_of(dim, count, blocks):
    return [Cut(SHAPE, dim, index, count, blocks) for index in range(count)]


@settings(max_examples=20)
@given(stored=st.none() | CUTS, wanted=st.none() | CUTS, data=st.data())
def test_any_range_of_any_part_is_read_from_any_parts(stored, wanted, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    whole = torch.arange(256.0).view(SHAPE)
    pieces = [
        Piece.whole(stored_name("weight/x", cut), whole if cut is None else cut.take(whole))
        for cut in ([None] if stored is None else parts_of(*stored))
    ]
    path = save(folder, 1, pieces, {})
    checkpoint = open_checkpoint(path)
    assert checkpoint.names == {"weight/x"} and checkpoint.shape("weight/x") == SHAPE
    assert torch.equal(checkpoint.load(["weight/x"])["weight/x"], whole)
    for cut in [None] if wanted is None else parts_of(*wanted):
        expected = (whole if cut is None else cut.take(whole)).flatten()
        start = data.draw(st.integers(0, expected.numel()))
        stop = data.draw(st.integers(start, expected.numel()))
        assert torch.equal(checkpoint.read("weight/x", start, stop, cut), expected[start:stop])
        assert list(checkpoint.pieces("weight/x", 0, None, cut))


@given(a=CUTS, b=CUTS)
def test_overlapping_parts_share_an_element(a, b):
    numbers = torch.arange(256).view(SHAPE)
    for first in parts_of(*a):
        for second in parts_of(*b):
            shared = set(first.take(numbers).flatten().tolist()) & set(second.take(numbers).flatten().tolist())
            assert overlap(first, second) or not shared


@pytest.mark.parametrize(
    "shapes",
    [
        {"part/0.0.2.1/x": (2, 3)},
        {"part/0.0.2.1/x": (2, 3), "part/0.1.2.1/x": (2, 4)},
        {"part/0.0.1.1/x": (2,), "x": (2,)},
        {"part/1.0.1.1/x": (2,)},
        {"part/0.2.2.1/x": (2,)},
        {"part/0.0.1.0/x": (2,)},
        {"part/0.0.0.1/x": (2,)},
        {"part/0.0.1.3/x": (2,)},
        {"part/0.0.999999999.1/x": (2,)},
    ],
)
def test_what_makes_no_tensor_is_refused(shapes, tmp_path):
    with pytest.raises(ValueError, match="part"):
        cut_tensors(shapes)
    path = save(tmp_path, 1, [Piece.whole(name, torch.zeros(shape)) for name, shape in shapes.items()], {})
    with pytest.raises(CheckpointError, match="part"):
        open_checkpoint(path)


def test_names_of_parts():
    assert whole_name(stored_name("optim/exp_avg/a/b", Cut((4, 4), 1, 1, 2))) == "optim/exp_avg/a/b"
    assert whole_name("weight/part") == "weight/part"
