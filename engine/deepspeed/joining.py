"""`weft.init_distributed`, which joins the job that a configuration of Weft or DeepSpeed describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.conf.schema import CommConfig, WeftConfig
from weft.engine import distributed
from weft.engine.deepspeed.keys import weft_section
from weft.engine.planning.joining import join


def init_distributed(
    config: WeftConfig | Mapping[str, Any] | str | Path | None = None, *, timeout_s: float | None = None
) -> torch.device:
    """Join the process group that the launcher's environment describes. Idempotent.

    Call this before other code creates a process group.

    Args:
        config: the run's configuration, or a DeepSpeed configuration (a dictionary or a JSON file) with a section
            "weft". It is needed if ``cluster`` has several sites. None means a single site.
        timeout_s: timeout of process groups. None means ``comm.timeout_s``.

    Returns:
        This rank's device.

    Raises:
        ValueError: the configuration has an unknown key, or a value of the wrong type.
    """
    if not isinstance(config, WeftConfig):
        config = weft_section(config) if config is not None else None
    if config is None:
        return distributed.init_distributed(timeout_s or CommConfig.timeout_s)
    if timeout_s:
        config = replace(config, comm=replace(config.comm, timeout_s=timeout_s))
    return join(config)
