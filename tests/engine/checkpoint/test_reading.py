"""Damage is found and named; any part of any tensor comes back as it was written."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.engine.checkpoint.ranks_in_threads import save_step, tensors, verify
from weft.engine.checkpoint import Checkpoint, CheckpointError, Piece, newest, open_checkpoint, save
from weft.engine.checkpoint.manifest import Manifest
from weft.engine.checkpoint.pieces import StoredPiece, StoredTensor, checksum, share
from weft.engine.checkpoint.shard_file import DTYPES, ShardReader, StoredFile, write_shard


@pytest.fixture
def two(tmp_path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    return tmp_path


def test_every_flipped_bit_is_found(two):
    """One bit in each 7th byte of every file, the manifest's included, makes reading fail with the file's name."""
    path = two / "step-00000002"
    for file in sorted(path.iterdir()):
        original = file.read_bytes()
        for at in range(0, len(original), 7):
            flipped = bytearray(original)
            flipped[at] ^= 1 << (at // 7 % 8)
            file.write_bytes(flipped)
            if file.name == "manifest.json" and _same_values(original, flipped):
                continue  # whitespace for other whitespace
            with pytest.raises(CheckpointError, match=file.name):
                verify(open_checkpoint(path))
        file.write_bytes(original)
    verify(open_checkpoint(path))


def _same_values(original: bytes, flipped: bytes) -> bool:
    try:
        return json.loads(original) == json.loads(flipped)
    except ValueError:
        return False


def test_a_header_that_says_something_else_and_can_be_read_is_found(two):
    path = two / "step-00000002" / "rank-001.safetensors"
    content = path.read_bytes()
    assert b'"F32"' in content
    path.write_bytes(content.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(CheckpointError, match="its header does not match its checksum"):
        verify(open_checkpoint(path.parent))


@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "empty", "no manifest", "foreign manifest"])
def test_newest_skips_damaged(two, damage, caplog):
    path = two / "step-00000002"
    shard, manifest = path / "rank-001.safetensors", path / "manifest.json"
    content = shard.read_bytes()
    match damage:
        case "cut":
            shard.write_bytes(content[:-1])
        case "longer":
            shard.write_bytes(content + b"x")
        case "missing":
            shard.unlink()
        case "empty":
            manifest.write_bytes(b"")
        case "no manifest":
            manifest.unlink()
        case "foreign manifest":
            manifest.write_text("[1, 2]")
    with caplog.at_level(logging.WARNING):
        assert newest(two) == two / "step-00000001"
    assert str(path) in caplog.text
    assert "damaged" in caplog.text
    with pytest.raises(CheckpointError, match=r"checkpoint\.resume"):
        open_checkpoint(path)


def test_nothing_there(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None
    (tmp_path / "step-00000003.tmp").mkdir()
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(tmp_path / "missing")


def test_newer_format(two, monkeypatch):
    from weft.engine.checkpoint import manifest

    monkeypatch.setattr(manifest, "FORMAT", 0)
    with pytest.raises(CheckpointError, match="update weft"):
        open_checkpoint(two / "step-00000002")


def test_unknown_tensor(two):
    with pytest.raises(CheckpointError, match="no tensor weight/z"):
        open_checkpoint(two / "step-00000002").load(["weight/z"])


def test_safetensors_reads_it(tmp_path):
    """The files are plain safetensors, in every type, and aligned."""
    generator = torch.Generator().manual_seed(0)
    held = {str(dtype): torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for dtype in DTYPES}
    save(tmp_path, 1, [Piece.whole(name, tensor) for name, tensor in held.items()], {})
    with safe_open(tmp_path / "step-00000001" / "rank-000.safetensors", "pt") as file:
        assert set(file.keys()) == held.keys()
        for name, tensor in held.items():
            assert torch.equal(file.get_tensor(name).view(torch.uint8), tensor.view(torch.uint8))
    verify(open_checkpoint(tmp_path / "step-00000001"))


def test_parts(two):
    checkpoint = open_checkpoint(two / "step-00000002")
    for name, expected in tensors(2).items():
        flat = expected.reshape(-1)
        for start in range(0, flat.numel(), 31):
            for stop in range(start, flat.numel(), 67):
                assert torch.equal(checkpoint.read(name, start, stop), flat[start:stop])


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])), max_size=8
    ),
    count=st.integers(1, 9),
)
def test_shares_are_even_and_make_the_whole(sizes, count):
    pieces = [Piece.whole(str(i), torch.arange(n).to(dtype)) for i, (n, dtype) in enumerate(sizes)]
    parts = [list(share(pieces, index, count)) for index in range(count)]
    for piece in pieces:
        found = [p for part in parts for p in part if p.name == piece.name and p.data.numel()]
        assert [p.start for p in found] == sorted(p.start for p in found)
        joined = torch.cat([p.data.reshape(-1) for p in found]) if found else piece.data
        assert torch.equal(joined, piece.data)
    total = sum(piece.num_bytes for piece in pieces)
    for part in parts:
        assert all(piece.data.numel() or piece.is_whole for piece in part), "nothing is stored of what others store"
        assert abs(sum(piece.num_bytes for piece in part) - total / count) <= 8


def test_meta_round_trip(tmp_path):
    meta = {"f": 0.1 + 0.2, "i": 2**60, "s": "ü\n", "n": None, "l": [1, [2.5e-300]], "inf": float("inf")}
    save(tmp_path, 1, [], meta)
    path = newest(tmp_path)
    assert path is not None
    assert isinstance(open_checkpoint(path), Checkpoint)
    assert open_checkpoint(path).meta == meta


def test_a_piece_of_another_type_or_size_than_the_manifest_says(tmp_path):
    """Even where its bytes match their checksum."""
    data = torch.arange(6, dtype=torch.float32)
    entry = write_shard(tmp_path / "rank-000.safetensors", [Piece("a", (10,), 2, data)])
    reader = ShardReader(tmp_path / entry.file.name, entry.file)
    (stored,) = entry.tensors["a"].pieces
    assert torch.equal(reader.read(stored, "F32"), data)
    for piece, dtype in (
        (stored, "F16"),
        (stored, "I32"),
        (replace(stored, stop=stored.stop + 1), "F32"),
        (replace(stored, start=stored.start + 1), "F32"),
        (replace(stored, stop=stored.stop - 1), "F32"),
    ):
        with pytest.raises(CheckpointError, match="a@2 has another type or size than the manifest says"):
            reader.read(piece, dtype)
    with pytest.raises(CheckpointError, match="a@2 does not match its checksum"):
        reader.read(replace(stored, checksum="0" * len(stored.checksum)), "F32")


def test_what_is_no_file_of_ours_or_lacks_a_piece_is_named(tmp_path):
    """Refused although sizes and checksums match the manifest."""
    path = tmp_path / "rank-000.safetensors"
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match=r"rank-000.*damaged"):
        ShardReader(path, StoredFile(path.name, 40, 40, checksum(path.read_bytes())))
    path.unlink()
    entry = write_shard(path, [Piece.whole("a", torch.ones(3))])
    (stored,) = entry.tensors["a"].pieces
    with pytest.raises(CheckpointError, match=r"rank-000.*: b: .*damaged"):
        ShardReader(path, entry.file).read(replace(stored, key="b"), "F32")


@pytest.mark.parametrize("here", [[], ["rank-000.safetensors"], ["rank-001.safetensors"]])
def test_elements_are_read_from_a_file_of_this_folder_where_there_is_one(tmp_path, here):
    """The longest of several pieces is read, so that few are."""
    names = [f"rank-00{number}.safetensors" for number in range(3)]
    pieces = [
        StoredPiece(0, 4, names[0], "a", ""),
        StoredPiece(0, 8, names[1], "a", ""),
        StoredPiece(2, 9, names[2], "a", ""),
    ]
    tensor = StoredTensor("F32", (9,), tuple(pieces))
    files = {name: StoredFile(name, 1, 1, "") for name in names}
    checkpoint = Checkpoint(tmp_path, Manifest(1, 1, "x", {}, files, here, {"a": tensor}))
    nearest = {(): names[1:], (names[0],): [names[0], names[2]], (names[1],): [names[1], names[2]]}[tuple(here)]
    assert [piece.file for piece, dtype in checkpoint.pieces("a")] == nearest
    assert [piece.file for piece, dtype in checkpoint.pieces("a", 2, 4)][:1] == (here or [names[2]])
    (tmp_path / names[2]).touch()
    assert [piece.file for piece, dtype in checkpoint.pieces("a", 5, 9)] == [names[2]]
    assert list(checkpoint.pieces("a", 3, 3)) == []
    checkpoint.keep(pieces[0], torch.arange(4.0))
    checkpoint.keep(pieces[1], torch.arange(8.0))
    checkpoint.keep(pieces[2], torch.arange(2.0, 9.0))
    for start in range(10):
        for stop in range(start, 10):
            assert checkpoint.read("a", start, stop).tolist() == list(range(start, stop))
