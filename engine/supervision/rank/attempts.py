"""Attempts: a rank that survives a fault keeps its process, releases all else, and joins the next attempt."""

from __future__ import annotations

import errno
import faulthandler
import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist

from weft.comm.job import current_job
from weft.comm.lifeline import abort_devices_groups
from weft.conf.host.private import without_credentials
from weft.engine.attempt import Attempt, ReusedValues, SetUpTimes, do_nothing
from weft.engine.checkpoint import CheckpointError
from weft.engine.checkpoint.durable import OUT_OF_SPACE, NoSpaceError, StorageError
from weft.engine.distributed import SharedError, attempt_number, leave_distributed, lost_peer
from weft.engine.observability.watcher import ERROR_FILE
from weft.engine.supervision.messages import ErrorReport, FaultKind
from weft.engine.supervision.rank.agent_link import AgentLink, write_report
from weft.engine.zero import NonFiniteError, ReplicasDiffer

_KINDS: dict[type[BaseException], FaultKind] = {
    NonFiniteError: FaultKind.bad_numbers,
    ReplicasDiffer: FaultKind.corruption,
    NoSpaceError: FaultKind.disk_full,
    StorageError: FaultKind.checkpoint,
    CheckpointError: FaultKind.checkpoint,
    torch.OutOfMemoryError: FaultKind.device_memory,
    MemoryError: FaultKind.host_memory,
    ValueError: FaultKind.input_error,
}
"""Classes of errors, the narrower first."""
_OF_SYSTEM = {errno.ENOMEM: FaultKind.host_memory} | dict.fromkeys(OUT_OF_SPACE, FaultKind.disk_full)
"""Errors of the operating system, by number."""
_NO_HOST_MEMORY = "DefaultCPUAllocator: "
"""Part of torch's message when host memory is exhausted; torch has no exception class for it."""


def fault_of(error: BaseException) -> FaultKind:
    """Return the fault class of an error that ends a rank."""
    if isinstance(error, SharedError):
        return next((kind for each, kind in _KINDS.items() if each.__name__ == error.kind), FaultKind.input_error)
    for each, kind in _KINDS.items():
        if isinstance(error, each):
            return kind
    if isinstance(error, OSError) and error.errno in _OF_SYSTEM:
        return _OF_SYSTEM[error.errno]
    if isinstance(error, RuntimeError):
        if _NO_HOST_MEMORY in str(error):
            return FaultKind.host_memory
        if lost_peer(error) is not None:
            return FaultKind.lost_peer
    return FaultKind.other


@contextmanager
def reported(attempt: Attempt) -> Iterator[None]:
    """Write an error report to the path in `ERROR_FILE` if the block fails, unless the attempt has one already."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            step, data = (None, None) if attempt.where is None else attempt.where()
            message = without_credentials(str(error)) or type(error).__name__
            ranks = error.ranks if isinstance(error, ReplicasDiffer | NonFiniteError) else ()
            report = ErrorReport(kind=fault_of(error), message=message, step=step, data=data, ranks=ranks)
            try:
                write_report(Path(path), report)
            except OSError as failure:  # the exit code remains
                print(f"weft train: {ERROR_FILE}={path}: {failure.strerror}", file=sys.stderr)
        raise


Once = Callable[[Sequence[str], Attempt], int]
"""Runs one attempt, from its arguments to its exit code; pushes its resources onto the stack, which releases them."""
log = logging.getLogger(__name__)
_OWN = ("weft", "rank ")
"""Prefixes of the names of Weft's threads; threads of libraries are not checked."""
JOIN_S = 0.05
STUCK_S = 2.5
"""Seconds after which a rank that received a leave command, and does not leave, prints its threads' stacks."""
THREADS_S = 10.0
"""Seconds that threads of an attempt have to end; otherwise the process ends, and is restarted."""


def run_attempts(argv: Sequence[str], once: Once) -> int:
    """Run ``once`` for each attempt that the agent assigns, and return the exit code.

    Without restarts in the same process (``WEFT_AGENT`` is unset) there is one attempt. An error that ends this process
    is written for the supervisor, and then propagates.

    Args:
        argv: arguments of the first attempt. Later attempts get theirs with the assignment.
    """
    set_up = SetUpTimes()
    with reported(Attempt()):
        agent = AgentLink.from_environment(os.environ)
    if agent is None:
        only = Attempt(set_up=set_up)  # never unwound, because the process ends
        with reported(only):
            return once(argv, only)
    first, threads = dict(os.environ), set(threading.enumerate())
    kept = ReusedValues()
    kept.keeps = True
    while True:
        attempt = Attempt(kept, set_up)
        agent.begin(attempt_number(), partial(_leave, attempt))
        ended = _attempt(agent, argv, once, attempt)
        if isinstance(ended, int):
            return ended
        if not _threads_ended(threads):
            return 1
        faulthandler.cancel_dump_traceback_later()  # a leave command may have arrived meanwhile
        set_up.done("leave")
        assignment = agent.stand_by(ended)
        if assignment is None:
            return 1
        set_up.done("standby")
        os.environ.clear()  # an attempt sets variables, such as the interface, that may not fit the next
        os.environ.update({**first, **assignment.environment})
        argv = assignment.arguments


def _attempt(agent: AgentLink, argv: Sequence[str], once: Once, attempt: Attempt) -> int | str:
    """Run an attempt. Return its exit code or, after its resources were released, why it ended early."""
    with attempt:
        try:
            with reported(attempt):
                code = once(argv, attempt)
            attempt.pop_all()
            return code
        except Exception as error:
            attempt.set_up.begin()
            lost = lost_peer(error) if isinstance(error, RuntimeError) else None
            if lost is None and not agent.leaving:
                attempt.pop_all()
                raise
            faulthandler.cancel_dump_traceback_later()
            attempt.interrupt, attempt.where = do_nothing, None  # they would keep the engine alive
            agent.tell_leaving()
            print(f"\nweft train: {lost or 'asked to leave'}", file=sys.stderr)
            reason = lost or str(error)
            _forget(error)
    leave_distributed()
    return reason


def _forget(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes, which hold the engine, tensors and process groups."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _threads_ended(others: set[threading.Thread]) -> bool:
    """True if all of Weft's threads have ended except those from before the first attempt."""
    limit = monotonic() + THREADS_S
    while True:
        gc.collect()  # a failed thread is referenced by its error, and references a process group
        own = (thread for thread in threading.enumerate() if thread.name.startswith(_OWN))
        left = [thread for thread in own if thread not in others]
        if not left:
            gc.collect()  # the last thread may have ended since
            return True
        if monotonic() > limit:
            print(f"weft train: thread {left[0].name} does not end; this process does", file=sys.stderr)
            return False
        left[0].join(JOIN_S)


def _leave(attempt: Attempt) -> None:
    """Fail all waits for other ranks. This runs on a thread when the agent requests that this rank leave.

    gloo does not need this, because ranks that have left have closed their connections, so waits for them fail. A
    transfer between sites, however, waits until its deadline, and other ranks wait for it. A rank that does not leave
    prints its threads' stacks, and then its agent kills it.
    """
    faulthandler.dump_traceback_later(STUCK_S)
    try:
        attempt.interrupt()
        current_job().close(linger_s=0.0)
    except Exception:  # the thread continues to read from the agent
        log.exception("leaving an attempt")
    if dist.is_initialized():
        abort_devices_groups()
