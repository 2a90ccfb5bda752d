"""Joining the job: the default process group through DeepSpeed, on GPUs or on CPUs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from weft.comm.channel import ChannelError

T = TypeVar("T")


class SharedError(ValueError):
    """Bad input that every rank has been told of, with the same message."""


def init_distributed(timeout_s: float) -> torch.device:
    """Join the process group that the launcher's environment describes; idempotent.

    A process without a launcher becomes a world of one.

    Returns:
        This rank's device.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    local_rank = int(os.environ.setdefault("LOCAL_RANK", "0"))
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # DeepSpeed 0.19.8 would compile its shared-memory operator at start-up, which takes
        # minutes and leaks /dev/shm; gloo serves without it. There is no switch for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        accelerator.set_device(local_rank)
    if not dist.is_initialized() and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    deepspeed.init_distributed(
        dist_backend=accelerator.communication_backend_name(),
        auto_mpi_discovery=False,
        timeout=timedelta(seconds=timeout_s),
        verbose=False,
    )
    return torch.device(accelerator.device_name(local_rank) if accelerator.device_name() != "cpu" else "cpu")


def ranks_on_this_host() -> int:
    """Ranks that the launcher (torchrun's, or DeepSpeed's) started here; the whole world, if it does not say."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(told) if told else dist.get_world_size()


def device_bytes(device: torch.device, sharing: int) -> float:
    """Memory of a rank's device: a GPU's own; of a host's, an equal share for each rank on it.

    Args:
        sharing: ranks on the host.
    """
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return psutil.virtual_memory().total / sharing


def process_groups() -> list[dist.ProcessGroup]:
    """The process groups of this process, in the order of their making.

    torch has no public list of them; this is where 2.11 to 2.13 keep it.
    """
    return list(dist.distributed_c10d._world.pg_map)


def close_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy ``groups``, but for those that DeepSpeed shares between engines; a collective call.

    An open group keeps two threads that wake up all the time: 30 engines' worth of idle gloo
    groups were measured to take a fifth of a core per process.
    """
    import deepspeed
    from deepspeed.utils import groups as shared

    kept = [value for value in vars(shared).values() if isinstance(value, dist.ProcessGroup)]
    for group in groups:
        if group not in kept:
            deepspeed.comm.destroy_process_group(group)


def together(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank; if it fails on any, every rank raises that rank's error.

    A collective call. So bad input ends the whole job with one message instead of leaving
    the other ranks to wait.

    Raises:
        SharedError: the first failing rank's message.
    """
    error: Exception | None = None
    result = None
    try:
        result = action()
    except (ValueError, OSError) as failure:
        error = failure
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if error is None else str(error))
    first = next((text for text in errors if text is not None), None)
    if first is not None:
        raise SharedError(first) from error
    return result  # type: ignore[return-value]


def from_rank_zero(action: Callable[[], T]) -> T:
    """What ``action`` returns on rank 0, on every rank.

    A collective call; errors as in `together`. For answers that differ between ranks, such as
    a search that is cut off by time.
    """
    shared = [together(lambda: action() if dist.get_rank() == 0 else None)]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]  # type: ignore[return-value]


def rank_zero_first(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and then on the others, who find its cached result.

    A collective call; errors as in `together`.
    """
    first = together(lambda: action() if dist.get_rank() == 0 else None)
    rest = together(lambda: action() if dist.get_rank() != 0 else None)
    return first if dist.get_rank() == 0 else rest  # type: ignore[return-value]


def lost_peer(error: RuntimeError) -> str | None:
    """What to say of an error that means that another rank has ended or cannot be reached; None of any other."""
    if isinstance(error, ChannelError):
        return str(error)
    # gloo has no exception of its own; its messages begin with the place in its source.
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"another rank has ended or cannot be reached: {str(error).splitlines()[0]}"
    return None


def first_to_fail() -> bool:
    """Whether this rank is the first of its job to ask: one message is enough for a failure that ends all.

    Where the store has gone, rank 0 has gone with it, and rank 1 speaks.
    """
    limit_s = 2.0
    try:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection(address, timeout=limit_s).close()  # a store retries for long
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=limit_s))
        return store.add("weft/failures", 1) == 1
    except (RuntimeError, OSError, KeyError):
        return os.environ.get("RANK", "0") == "1" or os.environ.get("WORLD_SIZE", "1") == "1"
