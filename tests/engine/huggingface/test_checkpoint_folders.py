"""Which of the Trainer's checkpoints is resumed from, and exports that replace older ones."""

import os
import shutil

import pytest
import torch
from transformers.trainer_callback import TrainerState

from weft.engine.checkpoint import Piece, save
from weft.engine.checkpoint.folder import LATEST
from weft.engine.huggingface.checkpoint_folders import (
    ENGINE_STATE,
    TRAINER_STATE,
    last_whole,
    move_into,
    whole_checkpoint,
)


def write(output, step):
    """A whole checkpoint of the Trainer after ``step``, whose folder was copied the later the smaller ``step`` is."""
    folder = output / f"checkpoint-{step}"
    save(folder / ENGINE_STATE, step, [Piece.whole("weight/a", torch.ones(3))], {LATEST: True})
    TrainerState().save_to_json(str(folder / TRAINER_STATE))
    os.utime(folder, (-step, -step))
    return folder


def lose_the_trainers_state(folder):
    (folder / TRAINER_STATE).unlink()


def tear_the_trainers_state(folder):
    (folder / TRAINER_STATE).write_text("{")


def damage_the_engines_state(folder):
    for path in (folder / ENGINE_STATE).rglob("*.json"):
        path.write_text("{")


@pytest.mark.parametrize("harm", [lose_the_trainers_state, tear_the_trainers_state, damage_the_engines_state])
def test_the_last_whole_checkpoint_is_resumed_from(tmp_path, harm):
    folders = {step: write(tmp_path, step) for step in (9, 10, 2)}
    (tmp_path / "runs").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    for step in (10, 9, 2):
        assert last_whole(str(tmp_path)) == str(folders[step]) == whole_checkpoint(str(folders[step]), "")
        harm(folders[step])
    with pytest.raises(ValueError, match="no whole checkpoint in output_dir"):
        last_whole(str(tmp_path))


@pytest.mark.parametrize(
    "harm", [lose_the_trainers_state, tear_the_trainers_state, damage_the_engines_state, shutil.rmtree]
)
def test_a_damaged_or_missing_checkpoint_is_refused_by_name(tmp_path, harm):
    folder = write(tmp_path, 3)
    harm(folder)
    with pytest.raises(ValueError, match=f"resume_from_checkpoint={folder}: .*; give a checkpoint-N"):
        whole_checkpoint(str(folder), str(tmp_path))


def test_an_export_replaces_what_was_there(tmp_path):
    part, folder = tmp_path / "part", tmp_path / "model"
    for place, text in ((part, "new"), (folder, "old")):
        (place / "tokenizer").mkdir(parents=True)
        for name in ("config.json", "tokenizer/vocab", f"of_{text}", f"tokenizer/of_{text}"):
            (place / name).write_text(text)
    move_into(part, folder)
    assert not part.exists()
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == {
        **dict.fromkeys(("config.json", "tokenizer/vocab", "of_new", "tokenizer/of_new"), "new"),
        "of_old": "old",
    }
