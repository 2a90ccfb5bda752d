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
    """Return the newest of the Trainer's checkpoints in ``output_dir`` that is complete.

    Raises:
        ValueError: no checkpoint is complete.
    """
    for folder in sorted(Path(output_dir).glob("checkpoint-*"), key=lambda f: f.stat().st_mtime, reverse=True):
        if newest(folder / ENGINE_STATE) is None:
            log.warning("skipped %s: its engine state is missing or damaged", folder)
            continue
        try:
            TrainerState.load_from_json(str(folder / TRAINER_STATE))
        except (OSError, ValueError, TypeError) as error:
            log.warning("skipped %s: %s", folder, error)
            continue
        return str(folder)
    raise ValueError(f"resume_from_checkpoint=True: no whole checkpoint in output_dir={output_dir}")


def move_into(part: Path, folder: Path) -> None:
    """Move everything from ``part`` into ``folder``, replacing existing entries, and remove ``part``."""
    for path in part.iterdir():
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    part.rmdir()
