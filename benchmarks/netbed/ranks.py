"""Ranks of one job of torch.distributed, in the nodes of a bed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

from weft.comm.key import VARIABLE
from weft.tools.netbed.bed import NetBed
from weft.tools.ranks import run_with

_PORTS = count(29400)  # a bed's own network: no other process is on it


def run_ranks_in(
    bed: NetBed,
    nodes: Sequence[str],
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Return the results of ``function(*args)`` on each rank, like `weft.tools.ranks.run_ranks`.

    Args:
        nodes: node of each rank; a node may hold several.
    """
    same = {
        "MASTER_ADDR": bed.address(nodes[0]),
        "MASTER_PORT": str(next(_PORTS)),
        "GLOO_SOCKET_IFNAME": "lan0",
        "DS_ACCELERATOR": "cpu",
        VARIABLE: os.environ.get(VARIABLE) or secrets.token_hex(32),
    }
    return run_with(
        [same | {"LOCAL_RANK": str(list(nodes[:rank]).count(node))} for rank, node in enumerate(nodes)],
        function,
        args,
        timeout_s=timeout_s,
        meanwhile=meanwhile,
        enter=[partial(bed.enter, node) for node in nodes],
        environment=os.environ,
    )
