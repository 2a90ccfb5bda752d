"""The clock of a run: the time that chat templates show. It is the same on all ranks and after a resume."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from weft.conf.host.private import write_private


def read_clock(folder: Path) -> datetime:
    """Return the time at which the run in ``folder`` first started, or the current time if it has not started.

    Raises:
        ValueError: the file with the time is damaged.
    """
    file = folder / "clock.json"
    try:
        return datetime.fromisoformat(json.loads(file.read_text())["started"])
    except FileNotFoundError:
        return datetime.now().replace(microsecond=0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: holds no time ({error}); remove it, and chat templates show today's date") from error


def start_clock(folder: Path, *, anew: bool = False) -> str:
    """Return the time of `read_clock` as text, for other ranks. The first call writes it into a file.

    Args:
        anew: replace the time by the current one, because the run in ``folder`` begins again.
    """
    if anew:
        (folder / "clock.json").unlink(missing_ok=True)
    started = read_clock(folder).isoformat()
    write_private(folder / "clock.json", json.dumps({"started": started}) + "\n")
    return started
