"""Supervision of a run: the driver, agents, the ranks' progress and memory checkpoints, and diagnosis of failures.

The core calls the functions of this module by `weft.conf.features.entry`. Each is imported when it is first called,
because driver and agents load without torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from weft.engine.supervision.messages import MEMORY

DRIVER = (f"{__name__}.driver.driver", "launch")
"""Module and first argument of a driver's process. The run's folder follows."""
_FUNCTIONS = {
    # Called by `weft launch` and `weft doctor node`
    "early_agent": ("agent.forkserver", "EarlyAgent"),
    "prepare": ("driver.files", "prepare_folder"),
    "drive": ("driver.driver", "drive"),
    "request_hosts": ("driver.managers.starters", "hosts_or_request"),
    "check_clock": ("control", "check_clock"),
    # Called by ranks
    "watcher": ("rank.agent_link", "Heartbeat.from_environment"),
    "run_attempts": ("rank.attempts", "run_attempts"),
    "open_memory": ("memory.checkpoints", "open_memory"),
}
"""The functions that the core calls: each with its module and its name there."""


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, function = _FUNCTIONS[name]
    return attrgetter(function)(import_module(f"{__name__}.{module}"))


def has_memory(variables: Mapping[str, str]) -> bool:
    """True if memory checkpoints may hold steps that storage lacks."""
    return os.path.isdir(variables.get(MEMORY, ""))
