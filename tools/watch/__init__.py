"""Observation of a run: the collector of its events, a web page, and explanations.

The core calls `collect` by `weft.conf.features.entry`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from weft.conf.host.private import make_run_folder
from weft.conf.schema import WeftConfig

FOLDER = "watch"
"""Folder of the collectors' files in a run's folder."""


def stored_difference(*args: Any) -> str:
    """See `weft.tools.watch.desync.stored_difference`."""
    from weft.tools.watch.desync import stored_difference

    return stored_difference(*args)


def collect(config: WeftConfig, run_folder: Path, *, first_host: bool) -> subprocess.Popen[bytes]:
    """Start this host's collector, which ends soon after the ranks. If one runs already, the new one waits for it.

    Args:
        first_host: True if it serves the run's Prometheus metrics (``logging.prometheus_port``).
    """
    folder = run_folder / FOLDER
    make_run_folder(folder)
    if config.train.shared:
        folder.chmod(run_folder.stat().st_mode & 0o777)
    port = config.logging.prometheus_port if first_host else 0
    command = [sys.executable, "-m", "weft.tools.watch.collector", str(run_folder), str(port)]
    with open(folder / "collector.log", "ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,  # it outlives a killed rank
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
