"""Where the bubble boards of a run lie, for those who write and those who read them."""

from __future__ import annotations

from pathlib import Path

from weft.conf.schema import WeftConfig


def boards_folder(config: WeftConfig, user: int) -> Path:
    """The folder of boards of a run on this host.

    Args:
        user: the numerical user id that trains.
    """
    if config.inference.boards:
        return Path(config.inference.boards).expanduser()
    return Path(f"/dev/shm/weft-{user}") / config.train.name
