"""Supervision of a run: the driver, agents, the ranks' progress and memory checkpoints, and diagnosis of failures.

The core calls the functions of this module by `weft.conf.features.entry`. Each imports what it needs, because driver
and agents load without torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.conf.host.diagnosis import Finding
    from weft.conf.schema import WeftConfig
    from weft.engine.attempt import Attempt
    from weft.engine.engine import WeftEngine
    from weft.engine.supervision.forkserver import EarlyAgent
    from weft.engine.supervision.heartbeat import Heartbeat

DRIVER = (f"{__name__}.driver", "launch")
"""Module and first argument of a driver's process. The run's folder follows."""

# Called by `weft launch`


def early_agent(environment: Mapping[str, str]) -> EarlyAgent:
    """Start the agent of this host, whose imports take longest."""
    from weft.engine.supervision.forkserver import PRELOAD, EarlyAgent

    return EarlyAgent(PRELOAD, environment)


def prepare(config: WeftConfig, folder: Path, environment: Mapping[str, str], *, supervised: bool = True) -> None:
    """Write what the driver of a run needs into its folder. See `weft.engine.supervision.run_files.prepare_folder`."""
    from weft.engine.supervision.run_files import prepare_folder

    prepare_folder(config, folder, environment, supervised=supervised)


def drive(folder: Path, *, attach: bool = False, early: EarlyAgent | None = None) -> int:
    """Drive a run to its end, and return its exit code. See `weft.engine.supervision.driver.drive`."""
    from weft.engine.supervision.driver import drive

    return drive(folder, attach=attach, early=early)


def request_hosts(
    config: WeftConfig, words: Sequence[str], folder: Path, write: str | None, environment: Mapping[str, str]
) -> WeftConfig | None:
    """Request hosts of a cluster manager. See `weft.engine.supervision.managers.asking.hosts_or_request`."""
    from weft.engine.supervision.managers.asking import hosts_or_request

    return hosts_or_request(config, words, folder, write, environment)


def check_clock(driver: str, shift_s: float = 0.0) -> Finding:
    """Compare this host's clock with a driver's. See `weft.engine.supervision.clock.check_clock`."""
    from weft.engine.supervision.clock import check_clock

    return check_clock(driver, shift_s)


# Called by ranks


def watcher(variables: Mapping[str, str]) -> Heartbeat:
    """Return the watcher of a rank that an agent started with these environment variables."""
    from weft.engine.supervision.heartbeat import Heartbeat

    return Heartbeat.from_environment(variables)


def run_attempts(argv: Sequence[str], once: Callable[[Sequence[str], Attempt], int]) -> int:
    """Run each attempt that the agent assigns. See `weft.engine.supervision.attempts.run_attempts`."""
    from weft.engine.supervision.attempts import run_attempts

    return run_attempts(argv, once)


def has_memory(variables: Mapping[str, str]) -> bool:
    """True if memory checkpoints may hold steps that storage lacks."""
    from weft.engine.supervision.memory.host_memory import VARIABLE

    return os.path.isdir(variables.get(VARIABLE, ""))


def open_memory(config: WeftConfig, engine: WeftEngine) -> str:
    """Attach memory checkpoints to a run's engine. See `weft.engine.supervision.memory.opening.open_memory`."""
    from weft.engine.supervision.memory.opening import open_memory

    return open_memory(config, engine)
