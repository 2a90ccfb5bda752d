"""Run functions on ranks: new processes on this machine, with a hard time limit, none of which is left behind."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from weft.conf.host.files import scratch_folder
from weft.conf.host.processes import free_port
from weft.tools.children import Child, results_of

_DUMP_AFTER = 0.95
"""Share of a rank's time after which it prints its stacks."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    meanwhile: Callable[[], object] | None = None,
) -> list[Any]:
    """Run ``function(*args)`` on every rank and return each rank's result.

    Each rank is a `Child`. Its output goes to a file, which is shown only if it fails. Ranks are killed
    when this function ends, and end by themselves if this process dies.

    Args:
        function: an importable function that returns plain data. The environment has the usual RANK, WORLD_SIZE,
            MASTER_ADDR and MASTER_PORT.
        meanwhile: called repeatedly until the first rank has ended.

    Raises:
        RuntimeError: a rank failed, with its traceback, or the time was up.
    """
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    own = [here | {"LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    return run_with(own, function, args, timeout_s=timeout_s, meanwhile=meanwhile)


def run_with(
    own: Sequence[Mapping[str, str]],
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    timeout_s: float,
    meanwhile: Callable[[], object] | None = None,
    enter: Sequence[Callable[[], object]] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ranks like `run_ranks`, each with its own environment variables.

    Args:
        own: variables of each rank, one mapping per rank.
        enter, environment: see `Child`; ``enter`` has one function per rank.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with scratch_folder("weft-ranks-") as folder, ExitStack() as stack:
        ranks = []
        for rank, variables in enumerate(own):
            given = {**variables, "RANK": str(rank), "WORLD_SIZE": str(len(own))}
            child = Child(
                f"rank {rank}",
                _rank,
                timeout_s,
                given,
                function,
                args,
                enter=enter[rank] if enter else None,
                environment=environment,
                log=Path(folder, f"rank{rank}.log"),
            )
            ranks.append(stack.enter_context(child))
        return results_of(ranks, timeout_s, meanwhile)


def _rank(
    send: Callable,
    receive: Callable,
    timeout_s: float,
    variables: dict[str, str],
    function: Callable,
    args: Sequence[Any],
) -> Any:
    faulthandler.dump_traceback_later(_DUMP_AFTER * timeout_s)
    os.environ.update(variables)
    import torch

    from weft.comm.job import current_job

    torch.set_num_threads(1)
    result = function(*args)
    current_job().close()  # delivers messages to other sites
    return result
