"""The folder of a run's bubble boards, for their writers and readers."""

from __future__ import annotations

from pathlib import Path

from weft.conf.private import shared_memory_folder
from weft.conf.schema import WeftConfig


def boards_folder(config: WeftConfig, user: int) -> Path:
    """The folder of a run's boards on this host.

    Args:
        user: numeric id of the user that trains.
    """
    if config.inference.boards:
        return Path(config.inference.boards).expanduser()
    return shared_memory_folder(user) / config.train.name
