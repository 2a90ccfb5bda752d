"""Process groups of a vLLM worker whose stages are on several hosts: none of them reaches another host.

vLLM (0.32.0) would connect all stages by gloo and NCCL, whose connections between hosts prove no key. Without tensor
parallelism it needs groups of several stages only for their numbers, to count hosts, to agree on the engine's name
(which all have in their configuration), and to send hidden states. So the processes on the worker's host have gloo
groups there, in which `RemoteStage` stands for a stage of another host, whose own groups have no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
"""A communicator without connections of its own. That of GPUs would connect all stages by NCCL."""


@contextmanager
def world_of_one_host() -> Iterator[None]:
    """Let vLLM create groups of gloo on this host, without NCCL."""
    with _communicators(), patch.object(type(current_platform), "dist_backend", "gloo"):
        yield
    _keep_own_values()


@contextmanager
def world_alone(rank: int, size: int) -> Iterator[None]:
    """Let vLLM create groups of ``size`` stages that communicate with nothing. This process is stage ``rank``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    new_group = dist.new_group

    def new_fake_group(ranks: list[int] | None = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake", **options)

    with (
        _communicators(),
        patch.object(dist, "new_group", new_fake_group),
        patch.object(parallel_state, "_node_count", lambda group: 1),
    ):
        yield
    _keep_own_values()


def _keep_own_values() -> None:
    for group in (parallel_state.get_world_group(), parallel_state.get_pp_group()):
        group.broadcast_object = lambda value=None, src=0: value


def _communicators() -> Any:
    return patch.object(type(current_platform), "get_device_communicator_cls", classmethod(_communicator))


def _communicator(_: type) -> str:
    return COMMUNICATOR
