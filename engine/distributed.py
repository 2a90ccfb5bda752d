"""Join the job: the default process group through DeepSpeed, on GPUs or CPUs, and errors shared by all ranks."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from weft.comm import rendezvous
from weft.comm.agreement import attempt
from weft.comm.backends import backend_of, on_host
from weft.comm.channel import ChannelError
from weft.comm.exchange import broadcast
from weft.comm.job import current_job
from weft.comm.links import Sites
from weft.conf.host.threads import Thread
from weft.conf.schema import CommConfig, WeftConfig

T = TypeVar("T")

log = logging.getLogger(__name__)


class SharedError(ValueError):
    """Bad input that is raised on every rank with the same message.

    Attributes:
        kind: name of the error's class on the first failing rank.
    """

    def __init__(self, message: str, kind: str = ValueError.__name__) -> None:
        super().__init__(message)
        self.kind = kind


def init_distributed(timeout_s: float = CommConfig.timeout_s, *, sites: Sites | None = None) -> torch.device:
    """Join the process group that the launcher's environment describes. Idempotent.

    A process without a launcher becomes a world of one. An existing group is used with a warning, because torch's own
    rendezvous listens on every address and accepts any peer.

    Args:
        sites: the sites of a job at several sites, whose ranks communicate only over authenticated links. None
            means a single site.

    Returns:
        This rank's device.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    accelerator = get_accelerator()
    leave_out_shm_operator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(local_rank)
    if not dist.is_initialized() and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    rendezvous.register()
    given = dist.is_initialized() and not rendezvous.made_here() and current_job().is_real
    if given and dist.get_rank() == 0 < dist.get_world_size() - 1:
        log.warning(
            "the process group was there before weft: torch's store listens on every address, without a key; call "
            "weft.init_distributed() first (with a Trainer: before TrainingArguments)"
        )
    backend, timeout = accelerator.communication_backend_name(), timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        # Not by DeepSpeed, which would bind a GPU to the group: NCCL then makes the communicator of every
        # group with the whole world, and all messages of a group share one stream.
        across = sites is not None and len(set(sites.of_ranks)) > 1
        sealed = not across and backend == "gloo"
        dist.init_process_group(
            backend_of(backend) if across or sealed else backend,
            init_method=rendezvous.METHOD,
            timeout=timeout,
            pg_options=sites if across else None,
        )
        if sealed and dist.get_rank() == 0 and not rendezvous.on_one_host():
            log.warning(
                "hosts of one site talk over gloo in the clear: keep the network between them private, or make each "
                "host a site of its own (cluster.sites), whose connections are authenticated and encrypted"
            )
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        timeout=timeout,
        verbose=False,
        init_method=rendezvous.METHOD,
    )
    return torch.device(accelerator.device_name(local_rank) if accelerator.device_name() != "cpu" else "cpu")


def attempt_number() -> int:
    """Return how often a supervisor has restarted the ranks of this run. 0 without a supervisor."""
    return int(os.environ.get("WEFT_ATTEMPT", "0"))


def is_supervised(config: WeftConfig) -> bool:
    """True if a supervisor restarts the ranks after a fault. By default, `weft launch` on one host does not."""
    return attempt_number() > 0 and config.supervise.enabled is not False


def leave_out_shm_operator() -> None:
    """Keep DeepSpeed from compiling an operator for CPUs at its start.

    DeepSpeed 0.19.8 has no switch for it. Compiling takes minutes and leaks /dev/shm. If an earlier process was
    killed meanwhile, it silently waits forever for that process's lock
    (~/.cache/torch_extensions/*/deepspeed_shm_comm/lock). gloo works without the operator.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def ranks_on_this_host() -> int:
    """Return the number of ranks that the launcher (torchrun or DeepSpeed) started here, by default the whole world."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(local_size) if local_size else dist.get_world_size()


def device_bytes(device: torch.device, sharing: int) -> float:
    """Return the memory of a rank: all of its GPU's memory, or an equal share of the host's memory.

    Args:
        sharing: number of ranks on the host.
    """
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / sharing


def process_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this process, in the order of creation.

    torch has no public list of them. This is the private list of 2.11 to 2.13.
    """
    return list(dist.distributed_c10d._world.pg_map)


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy ``groups``, except for groups that DeepSpeed shares between engines. Collective call.

    An open group has two threads that wake up all the time. The idle gloo groups of 30 engines took a fifth of a
    core per process.
    """
    import deepspeed
    from deepspeed.utils import groups as shared

    kept = [value for value in vars(shared).values() if isinstance(value, dist.ProcessGroup)]
    for group in groups:
        if group not in kept:
            deepspeed.comm.destroy_process_group(group)


def leave_distributed() -> None:
    """Leave the job without communication, because some peers have ended. `init_distributed` may follow.

    Process groups cannot be used afterwards, and references to one keep its threads and connections alive.
    """
    import deepspeed
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import groups as shared

    if dist.is_initialized() and on_host():
        dist.destroy_process_group()
    elif dist.is_initialized():
        dist.distributed_c10d._abort_process_group()  # a shutdown would wait for what cannot complete
    shared._release_process_group_references()  # deepspeed 0.19.8 stores groups in these variables
    deepspeed.comm.comm.cdb = p2p._groups = p2p._grid = None


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank. If it fails on any, every rank raises that rank's error. Collective call.

    So bad input ends the whole job with one message, and the other ranks do not wait.

    Raises:
        SharedError: the first failing rank's message.
    """
    outcome = attempt(action, catch=(ValueError, OSError))
    if outcome.failure is not None:
        raise SharedError(outcome.failure.text, outcome.failure.kind) from outcome.failure.cause
    return outcome.results[0]


def from_rank_zero(action: Callable[[], T], *kinds: type) -> T:
    """Return the result of ``action`` on rank 0, on every rank.

    Collective call. Errors as in `together`. For results that may differ between ranks, such as a search with a
    time limit.

    Args:
        kinds: dataclasses and enums that the result consists of.
    """
    return broadcast(together(lambda: action() if current_job().computes(0) else None), kinds=kinds)


def rank_zero_first(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and then on the others, which use its cached result.

    Collective call. Errors as in `together`.
    """
    first = together(lambda: action() if dist.get_rank() == 0 else None)
    rest = together(lambda: action() if dist.get_rank() != 0 else None)
    return first if dist.get_rank() == 0 else rest  # type: ignore[return-value]


def lost_peer(error: RuntimeError) -> str | None:
    """Return the message for an error that means that another rank has ended or is unreachable, or None."""
    if isinstance(error, ChannelError):
        return str(error)
    # gloo has no exception class. Its messages begin with the position in its source.
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"another rank has ended or cannot be reached: {str(error).splitlines()[0]}"
    return None


def first_to_fail() -> bool:
    """Return True if this rank is the first of its job to call this, so that a common failure is reported once.

    If the store has ended with rank 0, rank 1 reports.
    """
    if (first := _is_first("failures")) is not None:
        return first
    return os.environ.get("RANK", "0") == "1" or os.environ.get("WORLD_SIZE", "1") == "1"


def first_to_print(text: str) -> bool:
    """Return True on the first rank of the job that prints ``text``, or before the rendezvous, on each host's first."""
    first = _is_first(f"printed/{hashlib.sha256(text.encode()).hexdigest()}") if dist.is_initialized() else None
    return os.environ.get("LOCAL_RANK", "0") == "0" if first is None else first


def _is_first(name: str) -> bool | None:
    """Return True on the first rank that calls this with ``name``, or None if the job's store does not answer."""
    counted: list[int] = []

    def count() -> None:
        with suppress(RuntimeError, ValueError):
            counted.append(dist.distributed_c10d._get_default_store().add(f"weft/{name}", 1))

    asking = Thread(count, name="weft-arrivals")  # a store on a stopped host never answers
    asking.start()
    asking.join(timeout=2.0)
    return counted[0] == 1 if counted else None
