"""Manifests whose checksum is right and whose content is not: one error, and no path out of the folder."""

import copy
import json
import os
import random

import pytest

from tests.engine.checkpoint.ranks_in_threads import save_step, verify
from weft.engine.checkpoint import CheckpointError, newest, open_checkpoint
from weft.engine.checkpoint.manifest import MANIFEST, _canonical
from weft.engine.checkpoint.pieces import checksum

ROUNDS = 1500
STRANGE = [
    None,
    True,
    -1,
    0,
    1,
    2**70,
    1e400,
    float("nan"),
    "",
    "x",
    "../rank-000.safetensors",
    "/etc/passwd",
    "rank-000.safetensors\0",
    [],
    {},
    [[]],
    {"a": 1},
    "rank-001.safetensors",
    [1, -2],
    "F64",
]


@pytest.fixture
def saved(tmp_path):
    save_step(tmp_path, 1)
    return tmp_path / "step-00000001"


def sign(path, body):
    """Put ``body`` in the manifest's place, with the checksum that fits it."""
    content = _canonical(body)
    (path / MANIFEST).write_bytes(b'{"checksum":"%s","checkpoint":%s}' % (checksum(content).encode(), content))


def body_of(path):
    return json.loads((path / MANIFEST).read_text())["checkpoint"]


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def mutated(body, chance):
    """The tree with one place changed, dropped, doubled, or swapped with another."""
    body = copy.deepcopy(body)
    *above, last = chance.choice([place for place in places(body) if place])
    parent = body
    for key in above:
        parent = parent[key]
    match chance.randrange(5):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        case 1 | 2 if isinstance(parent, dict):
            parent[chance.choice(["x", "../x", "/x", "format", "rank-000.safetensors"])] = parent.pop(last)
        case 3 if isinstance(parent[last], int):
            parent[last] += chance.choice([-(2**40), -1, 1, 2**40])
        case _:
            parent[last] = chance.choice(STRANGE)
    return body


def test_changed_manifests_are_refused_in_one_way_or_mean_something(saved):
    """Whatever is changed, what is then read is inside the folder, and what goes wrong is a CheckpointError."""
    body, chance = body_of(saved), random.Random(0)
    refused = 0
    for _ in range(ROUNDS):
        changed = mutated(body, chance)
        if chance.random() < 0.3:
            changed = mutated(changed, chance)
        sign(saved, changed)
        try:
            checkpoint = open_checkpoint(saved)
            verify(checkpoint)
            checkpoint.load(checkpoint.names)
        except CheckpointError as error:
            assert str(saved) in str(error)
            assert len(str(error)) < 2000
            refused += 1
    assert refused > ROUNDS // 2
    sign(saved, body)
    verify(open_checkpoint(saved))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"checkpoint":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"checkpoint": {}, "checksum": ["a"]}',
        b"9" * 5000,
        b"\xff",
        b"null",
    ],
    ids=["open brackets", "deep", "list for a checksum", "a long number", "no text", "null"],
)
def test_what_is_no_manifest_at_all(saved, text):
    (saved / MANIFEST).write_bytes(text)
    with pytest.raises(CheckpointError, match=r"it is no manifest|does not match its checksum"):
        open_checkpoint(saved)
    assert newest(saved.parent) is None


@pytest.mark.parametrize("name", [MANIFEST, "rank-000.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "file with holes"])
def test_a_planted_file_neither_blocks_nor_fills_memory(saved, name, kind):
    body, size = body_of(saved), 100 << 30
    (saved / name).unlink()
    if kind == "pipe":
        os.mkfifo(saved / name)
        size = 0
    else:
        (saved / name).touch()
        os.truncate(saved / name, size)
    if name != MANIFEST:
        body["files"][name] |= {"num_bytes": size, "header_bytes": size}
        sign(saved, body)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        checkpoint = open_checkpoint(saved)
        checkpoint.load(checkpoint.names)


@pytest.mark.parametrize(
    "name", ["../../secret", "/etc/passwd", "rank-000.safetensors/../x", "..", "sub/rank-000.safetensors"]
)
def test_no_file_outside_of_the_checkpoint_is_opened(saved, name):
    body = body_of(saved)
    old = "rank-000.safetensors"
    text = json.dumps(body).replace(json.dumps(old), json.dumps(name))
    sign(saved, json.loads(text))
    with pytest.raises(CheckpointError, match=r"is no file's name; the checkpoint is damaged"):
        open_checkpoint(saved)


def test_a_link_in_the_place_of_a_new_checkpoint_is_not_written_through(tmp_path):
    folder, victim = tmp_path / "checkpoints", tmp_path / "victim"
    folder.mkdir()
    victim.mkdir()
    (victim / "kept").write_text("kept")
    os.symlink(victim, folder / "step-00000002.tmp")
    assert all(path == folder / "step-00000002" for path in save_step(folder, 2))
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert not (folder / "step-00000002").is_symlink()
    verify(open_checkpoint(folder / "step-00000002"))
