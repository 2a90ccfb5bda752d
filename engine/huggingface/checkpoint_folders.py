"""Checkpoint folders of the Trainer: the search for one to resume from, and the move of an export into one."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from transformers.trainer_callback import TrainerState

from weft.engine.checkpoint import newest

ENGINE_STATE = "weft"
"""Subfolder with the engine's state in each of the Trainer's checkpoints."""
TRAINER_STATE = "trainer_state.json"

log = logging.getLogger(__name__)


def last_whole(output_dir: str) -> str:
    """Return the Trainer's checkpoint after the most steps in ``output_dir`` that is complete.

    Raises:
        ValueError: no checkpoint is complete.
    """
    steps = (found.name.removeprefix("checkpoint-") for found in Path(output_dir).glob("checkpoint-*"))
    for step in sorted(map(int, filter(str.isdecimal, steps)), reverse=True):
        folder = Path(output_dir) / f"checkpoint-{step}"
        if not (damage := _damage(folder)):
            return str(folder)
        log.warning("skipped %s: %s", folder, damage)
    raise ValueError(f"resume_from_checkpoint=True: no whole checkpoint in output_dir={output_dir}")


def whole_checkpoint(chosen: str | bool, output_dir: str) -> str:
    """Return the checkpoint to resume from: the folder ``chosen``, or the last for True.

    Raises:
        ValueError: it is not complete, or none is.
    """
    if chosen is True:
        return last_whole(output_dir)
    if damage := _damage(Path(str(chosen))):
        raise ValueError(
            f"resume_from_checkpoint={chosen}: {damage}; give a checkpoint-N of WeftTrainer, or True for the last"
        )
    return str(chosen)


def _damage(folder: Path) -> str:
    """Return why a folder is not a complete checkpoint, or an empty text."""
    if not folder.is_dir():
        return "there is no such folder"
    if newest(folder / ENGINE_STATE) is None:
        return "its engine state is missing or damaged"
    try:
        TrainerState.load_from_json(str(folder / TRAINER_STATE))
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return ""


def move_into(part: Path, folder: Path) -> None:
    """Move everything from ``part`` into ``folder``, replacing existing entries, and remove ``part``."""
    for path in part.iterdir():
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    part.rmdir()
