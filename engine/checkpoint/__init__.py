"""Atomic checkpoints without pickle, independent of the layout of ranks."""

from weft.engine.checkpoint.background import BackgroundWriter
from weft.engine.checkpoint.durable import CheckpointError
from weft.engine.checkpoint.engine_checkpoint import (
    check_base_model,
    check_folder,
    load_engine,
    load_newest,
    load_tagged,
    save_engine,
    set_aside,
)
from weft.engine.checkpoint.engine_state import Wanted
from weft.engine.checkpoint.exporting import check_export, export
from weft.engine.checkpoint.folder import check_space, newest, tagged, to_resume
from weft.engine.checkpoint.pieces import Piece
from weft.engine.checkpoint.ranks import Ranks
from weft.engine.checkpoint.reader import Checkpoint, open_checkpoint
from weft.engine.checkpoint.writer import save

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointError",
    "Piece",
    "Ranks",
    "Wanted",
    "check_base_model",
    "check_export",
    "check_folder",
    "check_space",
    "export",
    "load_engine",
    "load_newest",
    "load_tagged",
    "newest",
    "open_checkpoint",
    "save",
    "save_engine",
    "set_aside",
    "tagged",
    "to_resume",
]
