"""The caller's own state comes back as it was, without pickle, or is refused by name."""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.engine.checkpoint import CheckpointError, Piece, open_checkpoint, save
from weft.engine.checkpoint.client_state import decode, encode


def there_and_back(folder, state):
    tree, tensors = encode(state)
    path = save(
        folder, 1, [Piece.whole(name, tensor) for name, tensor in tensors.items()], json.loads(json.dumps(tree))
    )
    checkpoint = open_checkpoint(path)
    return decode(checkpoint.meta, checkpoint)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.cpu(), other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other and type(one) is type(other)


def test_there_and_back(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 4))
    state = {
        "iteration": 12,
        "name": "a",
        "none": None,
        "rate": 0.1,
        "list": [1, [2.5, True]],
        "ema": {
            "weight": weight,
            "half": torch.randn(5).bfloat16(),
            "scalar": torch.tensor(3),
            "none": torch.zeros(0, 2),
        },
        "turned": torch.arange(6).reshape(2, 3).T,
        "flags": torch.tensor([True, False]),
        "losses": np.linspace(0, 1, 4),
        "zero": np.array(7),
        "random": random.getstate(),
        "numpy": np.random.RandomState(3).get_state(),
        "torch": torch.get_rng_state(),
        "empty": {},
    }
    back = there_and_back(tmp_path, state)
    assert back["random"] == state["random"]
    state["ema"]["weight"] = weight.detach()
    state["numpy"] = tuple(state["numpy"])
    assert same(state, back)


def test_what_is_written_later_does_not_reach_the_checkpoint():
    tensor = torch.zeros(2)
    _, tensors = encode({"a": tensor})
    tensor.fill_(1)
    assert not tensors["client/0"].any()


def test_numbers_of_numpy_become_pythons():
    tree, tensors = encode({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)})
    assert tree == {"a": 3, "b": 0.5, "c": True} and not tensors
    assert [type(value) for value in tree.values()] == [int, float, bool]


LOOP: list = []
LOOP.append(LOOP)
BAD = [
    ({"args": argparse.Namespace(a=1)}, r"client_state\.args: a Namespace cannot be stored without pickle"),
    ({"a": [{"b": {1, 2}}]}, r"client_state\.a\[0\]\.b: a set cannot be stored"),
    ({"path": Path("x")}, "a PosixPath cannot be stored"),
    ({"bytes": b"x"}, "a bytes cannot be stored"),
    ({"a": {1: 2}}, r"client_state\.a: key 1: keys have to be text"),
    ({"a": {"__weft__": "tensor"}}, "keys have to be text other than '__weft__'"),
    ({"a": torch.zeros(2, dtype=torch.complex64)}, "a tensor of torch.complex64"),
    ({"a": torch.eye(2).to_sparse()}, "torch.sparse_coo"),
    ({"a": torch.zeros(2, device="meta")}, "on meta cannot be stored"),
    ({"a": np.array(["x"])}, "an array of <U1"),
    ({"a": np.array([None])}, "an array of object"),
    ({"a": np.arange(3, dtype=">i4")}, "an array of >i4"),
    ({"a": LOOP}, "holds itself"),
    ({"a": torch.nn.Linear(1, 1)}, "a Linear cannot be stored .* its state_dict"),
]


@pytest.mark.parametrize(("state", "part"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_stored_is_named(state, part):
    with pytest.raises(CheckpointError, match=part):
        encode(state)
