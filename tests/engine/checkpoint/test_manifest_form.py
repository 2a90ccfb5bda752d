"""Shapes in a manifest: as large as they may be, and no larger."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.checkpoint import CheckpointError, Piece, manifest, manifest_form, save
from weft.engine.checkpoint.manifest_form import MOST_AXES, MOST_ELEMENTS, FormError, _tensor
from weft.engine.checkpoint.pieces import StoredPiece, StoredTensor, checksum
from weft.engine.checkpoint.shard_file import ShardEntry, StoredFile


@pytest.mark.parametrize("shape", [[0, 1 << 56], [0, MOST_ELEMENTS], [0] * MOST_AXES, [0]])
def test_the_largest_shapes_are_taken(shape):
    assert list(_tensor({"shape": shape, "dtype": "F32", "pieces": []}, {}).shape) == shape


@pytest.mark.parametrize(
    "shape", [[1 << 57], [0, MOST_ELEMENTS + 1], [0, 2, MOST_ELEMENTS], [0] * (MOST_AXES + 1), [-1], [True]]
)
def test_larger_ones_are_refused(shape):
    with pytest.raises(FormError, match="shape="):
        _tensor({"shape": shape, "dtype": "F32", "pieces": []}, {})


NAME = "rank-000.safetensors"


def body():
    pieces = [
        {"start": 0, "stop": 4, "file": NAME, "key": "a", "checksum": "x"},
        {"start": 4, "stop": 6, "file": "rank-001.safetensors", "key": "a", "checksum": "y"},
    ]
    files = {
        f"rank-00{n}.safetensors": {
            "name": f"rank-00{n}.safetensors",
            "num_bytes": 90 + n,
            "header_bytes": 80,
            "header_checksum": f"h{n}",
        }
        for n in (0, 1)
    }
    tensors = {"a": {"shape": [2, 3], "dtype": "F32", "pieces": pieces}}
    return {"files": files, "here": [NAME], "tensors": tensors, "step": 3, "norms": [1, 2.5], "text": "x"}


def read(given):
    files = manifest_form.files(given)
    rest = manifest_form.number(given, "step"), manifest_form.numbers(given, "norms"), manifest_form.text(given, "text")
    return files, manifest_form.here(given, files), manifest_form.tensors(given, files), rest


def test_what_is_written_is_read():
    files, here, tensors, rest = read(body())
    assert files == {
        f"rank-00{n}.safetensors": StoredFile(f"rank-00{n}.safetensors", 90 + n, 80, f"h{n}") for n in (0, 1)
    }
    assert here == (NAME,)
    pieces = (StoredPiece(0, 4, NAME, "a", "x"), StoredPiece(4, 6, "rank-001.safetensors", "a", "y"))
    assert tensors == {"a": StoredTensor("F32", (2, 3), pieces)}
    assert rest == (3, [1.0, 2.5], "x")
    assert [type(value) for value in rest[1]] == [float, float]


def paths(value, at=()):
    """Where every value of a nested one lies."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from paths(one, (*at, key))


def changed(path, change):
    """The body with the value at a path replaced; None takes it away."""
    whole = body()
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    if change is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = change(holder[path[-1]])
    return whole


OTHERS = [None, lambda _: True, lambda _: [{}], lambda _: {"x": []}, lambda _: float("nan"), lambda _: "../x"]
FREE = {("text",), ("tensors", "a"), ("norms", 0), ("norms", 1), ("here", 0)}
"""May be another text, or be left out."""


@pytest.mark.parametrize("path", list(paths(body())), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("change", range(len(OTHERS)))
def test_a_value_of_another_kind_is_refused_wherever_it_stands(path, change):
    free = path in FREE or path[-1] in ("key", "checksum", "header_checksum")
    if free and change == (5 if isinstance(_at(path), str) and path != ("here", 0) else 0):
        return
    with pytest.raises(FormError):
        read(changed(path, OTHERS[change]))


def _at(path):
    value = body()
    for key in path:
        value = value[key]
    return value


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("files", NAME, "num_bytes"), 79, "header_bytes=80: more than num_bytes=79"),
        (("files", NAME, "header_bytes"), -1, "header_bytes=-1: the least is 0"),
        (("files", NAME, "name"), "rank-001.safetensors", "is no file's name"),
        (("here",), [NAME, "rank-002.safetensors"], "is none of its files"),
        (("tensors", "a", "dtype"), "F33", "dtype='F33': none of"),
        (("tensors", "a", "pieces", 1, "stop"), 7, "go beyond its 6 elements"),
        (("tensors", "a", "pieces", 1, "stop"), 5, "no piece holds elements"),
        (("tensors", "a", "pieces", 1, "start"), 5, "no piece holds elements"),
        (("tensors", "a", "pieces", 0, "start"), 5, "stop=4: the least is 5"),
        (("tensors", "a", "pieces", 1, "file"), "rank-002.safetensors", "is none of its files"),
        (("norms",), [1.0, float("inf")], "not all of them are finite"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_its_place(path, value, said):
    with pytest.raises(FormError, match=said) as caught:
        read(changed(path, lambda _: value))
    if path[0] in ("files", "tensors"):
        assert f"{path[0]}['{path[1]}']: " in str(caught.value)


@pytest.mark.parametrize("name", ["rank-00.safetensors", "../rank-000.safetensors", "rank-000.safetensors.x", "/etc"])
def test_files_have_names_of_ours(name):
    whole = body()
    whole["files"][name] = whole["files"][NAME] | {"name": name}
    with pytest.raises(FormError, match="is no file's name"):
        read(whole)


def test_pieces_come_in_order():
    whole = body()
    whole["tensors"]["a"]["pieces"].reverse()
    with pytest.raises(FormError, match="out of order"):
        read(whole)


def test_long_values_are_cut_in_messages():
    with pytest.raises(FormError, match=r"^step='x{99}\.\.\.: expected int$"):
        manifest_form.number({"step": "x" * 500}, "step")


def piece(start, stop, file="rank-000.safetensors"):
    return StoredPiece(start, stop, file, "key", "sum")


def entry_of(number, *pieces, dtype="F32", shape=(10,)):
    file = f"rank-{number:03d}.safetensors"
    own = tuple(replace(each, file=file) for each in pieces)
    return ShardEntry(StoredFile(file, 9, 5, "h"), {"weight/a": StoredTensor(dtype, shape, own)})


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), min_size=1, max_size=6))
def test_what_ranks_wrote_is_joined_in_order_if_it_is_everything(ranges):
    """Elements that are missing are named; those that several ranks wrote are theirs alike."""
    entries = [entry_of(number, piece(start, min(stop, 10))) for number, (start, stop) in enumerate(ranges)]
    lacking = set(range(10)) - {element for start, stop in ranges for element in range(start, min(stop, 10))}
    beyond = any(start > 10 for start, _ in ranges)
    if lacking or beyond:
        with pytest.raises(CheckpointError, match=r"weight/a: elements .* are missing in what the ranks wrote"):
            manifest.join(3, 1, "x", {}, entries, ())
        return
    joined = manifest.join(3, 1, "x", {"m": 1}, entries, ("rank-000.safetensors",))
    found = joined.tensors["weight/a"]
    assert sorted((p.start, p.stop, p.file) for p in found.pieces) == [(p.start, p.stop, p.file) for p in found.pieces]
    assert len(found.pieces) == len(ranges) and found.missing() == "" and found.num_elements == 10
    assert set(joined.files) == {entry.file.name for entry in entries}
    assert (joined.step, joined.serial, joined.name, joined.meta) == (3, 1, "x", {"m": 1})


@pytest.mark.parametrize(("dtype", "shape"), [("F16", (10,)), ("F32", (2, 5))])
def test_ranks_have_to_hold_one_tensor_alike(dtype, shape):
    with pytest.raises(CheckpointError, match="weight/a: ranks hold it with different types or shapes"):
        manifest.join(
            1, 1, "x", {}, [entry_of(0, piece(0, 5)), entry_of(1, piece(5, 10), dtype=dtype, shape=shape)], ()
        )


@pytest.mark.parametrize(
    ("ranges", "missing"),
    [
        ([], "0 to 10"),
        ([(0, 4)], "4 to 10"),
        ([(1, 10)], "0 to 1"),
        ([(0, 4), (5, 10)], "4 to 5"),
        ([(0, 9), (2, 4)], "9 to 10"),
        ([(0, 9), (2, 4), (9, 10)], ""),
        ([(0, 11)], "11 to 10"),
    ],
)
def test_the_first_elements_that_are_missing_are_named(ranges, missing):
    assert StoredTensor("F32", (2, 5), tuple(piece(*each) for each in ranges)).missing() == missing


@pytest.mark.parametrize("change", [{"step": -1}, {"tensors": []}, {"name": 3}, {"here": ["another"]}, {"format": 0}])
def test_a_manifest_whose_checksum_is_right_may_yet_be_none_of_ours(tmp_path, change):
    path = save(tmp_path, 1, [Piece.whole("weight/a", torch.ones(3))], {})
    outer = json.loads((path / manifest.MANIFEST).read_bytes())
    outer["checkpoint"] |= change
    outer["checksum"] = checksum(manifest._canonical(outer["checkpoint"]))
    (path / manifest.MANIFEST).write_text(json.dumps(outer))
    (field,) = change
    with pytest.raises(CheckpointError, match=f"matches its checksum and is no manifest of ours: {field}.*resume"):
        manifest.read_manifest(path)
