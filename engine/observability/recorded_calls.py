"""The socket and the frames of recorded calls. Loads without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_TORCH = "/torch/"


def calls_socket(rings: Path, rank: int) -> Path:
    """Return the socket of a rank's Flight Recorder, in the folder of the run's rings."""
    return rings / f"calls{rank}"


def own_frame(frames: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the innermost frame outside of torch, or None."""
    return next((frame for frame in frames if _TORCH not in str(frame["filename"])), None)
