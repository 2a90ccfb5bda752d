"""Error reports: the class of the error that ends this rank, written for the supervisor."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weft.engine.attempt import Attempt
from weft.engine.checkpoint import CheckpointError
from weft.engine.checkpoint.errors import OUT_OF_SPACE, NoSpaceError, StorageError
from weft.engine.distributed import SharedError, lost_peer
from weft.engine.observability.watcher import ERROR_FILE
from weft.engine.supervision.faults import ErrorReport, FaultKind, write_report
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
    """Write an error report to the path in `ERROR_FILE` if the block fails; the first report of an attempt remains."""
    try:
        yield
    except Exception as error:
        if path := os.environ.get(ERROR_FILE):
            step, data = (None, None) if attempt.where is None else attempt.where()
            message = str(error) or type(error).__name__
            ranks = error.ranks if isinstance(error, ReplicasDiffer | NonFiniteError) else ()
            report = ErrorReport(kind=fault_of(error), message=message, step=step, data=data, ranks=ranks)
            try:
                write_report(Path(path), report)
            except OSError as failure:  # the exit code remains
                print(f"weft train: {ERROR_FILE}={path}: {failure.strerror}", file=sys.stderr)
        raise
