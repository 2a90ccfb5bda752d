"""Several ranks on one GPU, where NCCL refuses to connect them: they talk like ranks at different sites."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from weft.comm.key import VARIABLE
from weft.conf.host.processes import free_port
from weft.tools.ranks import run_with

TWO_SITES = (
    "cluster=two_sites",
    "cluster.sites=[{name: east, ranks: 1}, {name: west, ranks: 1}]",
    "cluster.links=[{sites: [east, west], latency_ms: 0.1, bandwidth_mbps: 50000}]",
)
"""Settings of two pipeline ranks, each of which is a site."""


def run_on_one_gpu(num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float) -> list[Any]:
    """Run ``function(*args)`` on every rank and return each rank's result, as `run_with` does."""
    os.environ.update({"DS_ACCELERATOR": "cuda", VARIABLE: secrets.token_hex(32)})
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    return run_with([here] * num_ranks, function, args, timeout_s=timeout_s)
