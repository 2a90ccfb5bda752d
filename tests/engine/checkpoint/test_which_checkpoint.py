"""Ranks restore one and the same checkpoint, or none."""

import pytest
import torch

from weft.engine.checkpoint import CheckpointError, Piece, Ranks, engine_checkpoint, save
from weft.engine.checkpoint.durable import OtherBaseError, OtherModelError
from weft.engine.checkpoint.folder import LATEST


def write(folder, step):
    return save(folder, step, [Piece.whole("weight/a", torch.full((5,), float(step)))], {LATEST: True})


@pytest.fixture
def two_ranks(monkeypatch):
    """Two ranks that restore: this one, and another whose answers `other` makes of this one's."""
    answers = {"other": lambda value: value}
    ranks = Ranks(0, lambda value: [value, answers["other"](value)])
    monkeypatch.setattr(engine_checkpoint, "_ranks", lambda group=None: ranks)
    monkeypatch.setattr(engine_checkpoint, "check_form", lambda checkpoint: checkpoint)
    monkeypatch.setattr(engine_checkpoint, "_read_once", lambda *_: None)
    monkeypatch.setattr(engine_checkpoint, "check_base", lambda *_: None)
    restored = []

    def restore(engine, checkpoint, ranks, wanted):
        restored.append(checkpoint.step)
        return {}

    monkeypatch.setattr(engine_checkpoint, "restore", restore)
    return answers, restored


def test_ranks_that_see_different_checkpoints_of_one_name_restore_none(tmp_path, two_ranks):
    answers, restored = two_ranks
    path = write(tmp_path, 3)
    assert engine_checkpoint.load_engine(None, path) == {}
    assert restored == [3]
    answers["other"] = lambda value: f"another {value}" if isinstance(value, str) else value
    with pytest.raises(CheckpointError, match="ranks see different checkpoints of that name"):
        engine_checkpoint.load_engine(None, path)
    assert restored == [3]


@pytest.mark.parametrize("kind", [OtherBaseError, OtherModelError])
def test_an_older_checkpoint_does_not_stand_in_for_one_of_another_model(tmp_path, two_ranks, monkeypatch, kind):
    _, restored = two_ranks
    paths = {step: write(tmp_path, step) for step in (2, 5)}

    def check_base(engine, checkpoint, wanted):
        if checkpoint.path == paths[5]:
            raise kind("other weights")

    monkeypatch.setattr(engine_checkpoint, "check_base", check_base)
    with pytest.raises(kind):
        engine_checkpoint.load_newest(None, tmp_path)
    assert restored == []


def test_the_newest_that_every_rank_has_is_restored(tmp_path, two_ranks):
    answers, restored = two_ranks
    paths = {step: write(tmp_path, step) for step in (2, 5, 8)}
    assert engine_checkpoint.load_newest(None, tmp_path) == (paths[8], {})

    def without(*lost):
        """The other rank lacks these steps."""
        names = {engine_checkpoint.open_checkpoint(paths[step]).manifest.name for step in lost}

        def other(value):
            if isinstance(value, tuple) and value and isinstance(value[0], tuple):
                return tuple(name for name in value[0] if name not in names), value[1]
            return value

        return other

    answers["other"] = without(8)
    assert engine_checkpoint.load_newest(None, tmp_path) == (paths[5], {})
    answers["other"] = without(5, 8)
    assert engine_checkpoint.load_newest(None, tmp_path) == (paths[2], {})
    answers["other"] = without(2, 5, 8)
    with pytest.raises(CheckpointError, match="on every rank; repair or copy one"):
        engine_checkpoint.load_newest(None, tmp_path)
    assert restored == [8, 5, 2]


def test_without_checkpoints_there_is_nothing_to_restore(tmp_path, two_ranks):
    assert engine_checkpoint.load_newest(None, tmp_path) is None


def test_one_that_cannot_be_restored_gives_way_to_the_one_before(tmp_path, two_ranks, monkeypatch):
    _, restored = two_ranks
    paths = {step: write(tmp_path, step) for step in (2, 5)}
    whole = engine_checkpoint.restore

    def restore(engine, checkpoint, ranks, wanted):
        if checkpoint.step in broken:
            raise CheckpointError("on purpose")
        return whole(engine, checkpoint, ranks, wanted)

    monkeypatch.setattr(engine_checkpoint, "restore", restore)
    broken = {5}
    assert engine_checkpoint.load_newest(None, tmp_path) == (paths[2], {})
    broken = {2, 5}
    with pytest.raises(CheckpointError, match="on purpose"):
        engine_checkpoint.load_newest(None, tmp_path)
    assert restored == [2]


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(engine_checkpoint, "_ranks", lambda group=None: Ranks())


@pytest.mark.parametrize(
    "least_step, left", [(9, {2, 5, 8}), (8, {2, 5}), (6, {2, 5}), (3, {2}), (2, {2, 5, 8}), (0, {2, 5, 8})]
)
def test_suspect_checkpoints_are_set_aside_where_an_older_one_is_left(tmp_path, alone, least_step, left):
    paths = {step: write(tmp_path, step) for step in (2, 5, 8)}
    aside = engine_checkpoint.set_aside(tmp_path, least_step)
    assert {step for step, path in paths.items() if path.exists()} == left
    assert {path.name for path in aside} == {path.name for step, path in paths.items() if step not in left}
    assert all((path / "manifest.json").exists() for path in aside), "they are there for whoever trusts them"
    newest = next(path for path, _ in engine_checkpoint.to_resume(tmp_path))
    assert newest == paths[max(left)]


def test_one_that_was_set_aside_gives_way_to_another_of_its_name(tmp_path, alone):
    write(tmp_path, 2)
    for _ in range(2):
        write(tmp_path, 5)
        (aside,) = engine_checkpoint.set_aside(tmp_path, 5)
    assert engine_checkpoint.open_checkpoint(aside).step == 5
    assert engine_checkpoint.set_aside(tmp_path / "none", 1) == []
