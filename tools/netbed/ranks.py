"""Ranks of one job of torch.distributed, in the nodes of a bed."""

from __future__ import annotations

import faulthandler
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

from weft.comm.wan.key import VARIABLE
from weft.tools.netbed.bed import NetBed
from weft.tools.netbed.job import Job

_TOLD = 0.95
_PORTS = count(29400)  # a bed's own network: nobody else is on it


def run_ranks_in(
    bed: NetBed,
    nodes: Sequence[str],
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    meanwhile: Callable[[], object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """What ``function(*args)`` returned on each rank.

    Args:
        nodes: node of each rank; a node may hold several.
        function: as of `weft.tools.ranks.run_ranks`.
        timeout_s: seconds after which the run is given up.
        meanwhile: called again and again until the first rank has ended.
        environment: further variables of every rank.

    Raises:
        RuntimeError: a rank failed, with its traceback.
        TimeoutError: the time was up; shortly before that each rank writes its stacks to stderr.
    """
    port, key = next(_PORTS), os.environ.get(VARIABLE) or secrets.token_hex(32)
    deadline = monotonic() + timeout_s
    with ExitStack() as stack:
        jobs = []
        for rank, node in enumerate(nodes):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(list(nodes[:rank]).count(node)),
                "WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": bed.address(nodes[0]),
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lan0",
                "DS_ACCELERATOR": "cpu",
                VARIABLE: key,
                **(environment or {}),
            }
            jobs.append(stack.enter_context(Job(bed, node, _rank, timeout_s, variables, function, args)))
        while meanwhile is not None and not _ready(jobs, 0.0) and monotonic() < deadline:
            meanwhile()
        return _results(jobs, deadline)


def _results(jobs: Sequence[Job], deadline: float) -> list[Any]:
    """What the jobs return; of several that fail the first to do so, for the others fail of that."""
    results: dict[Job, Any] = {}
    while missing := [job for job in jobs if job not in results]:
        ready = _ready(missing, max(0.0, deadline - monotonic())) or missing[:1]
        results |= {job: job.result(0.0) for job in ready}
    return [results[job] for job in jobs]


def _ready(jobs: Sequence[Job], timeout_s: float) -> list[Job]:
    """Those that have news, as soon as one has."""
    files = wait([job.fileno() for job in jobs], timeout_s)
    return [job for job in jobs if job.fileno() in files]


def _rank(
    say: Callable, hear: Callable, timeout_s: float, environment: dict[str, str], function: Callable, args: tuple
) -> Any:
    os.environ.update(environment)
    faulthandler.dump_traceback_later(_TOLD * timeout_s)  # where it hangs, while there is time to tell
    import torch

    from weft.comm.sites.joining import leave

    torch.set_num_threads(1)
    result = function(*args)
    leave()
    return result
