"""vLLM's worker process for a pipeline stage on another host: it forwards the executor's calls.

`--worker-cls weft.inference.worker.vllm_remote_stage.stage_worker`. Hidden states pass through this process, in the
worker's group on this host. The stage itself is in a `vllm_stage_host` on the host of its rank, whose bubble board is
copied here for the scheduler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed import get_pp_group
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

from weft.comm.message_stream import connect
from weft.conf.host.threads import Thread
from weft.inference.board.clock_offset import ClockOffset
from weft.inference.board.mirror import BoardMirror, follow_board
from weft.inference.worker.gate import Span
from weft.inference.worker.host_tensors import packed, unpacked
from weft.inference.worker.remote_calls import RemoteCalls
from weft.inference.worker.settings import WorkerSettings
from weft.inference.worker.status import BEAT_S, record
from weft.inference.worker.vllm_interfaces import SPANS, make_readers_block
from weft.inference.worker.vllm_stage import StageWorker
from weft.inference.worker.vllm_worlds import world_of_one_host

logger = init_logger(f"vllm.{__name__}")

PURPOSE = "prefill stage"
"""Purpose of the connections, in the derivation of their key."""
CALLS, BOARD = b"calls", b"board"
"""First message of a connection: what it is for."""
WAIT_S = 300.0
"""Longest wait for the stage's process."""


class RemoteStage:
    """A stage on another host. Methods that are not here are the stage's.

    Attributes:
        rank: number of the stage.
    """

    def __init__(self, vllm_config: Any, local_rank: int, rank: int, distributed_init_method: str, **more: Any) -> None:
        """Wait for the stage's process, and create the stage there. Arguments are those of vLLM's workers.

        Raises:
            ValueError: the other host has another key.
            ConnectionError: nothing has answered within `WAIT_S`.
        """
        settings = WorkerSettings.of(vllm_config.additional_config)
        self._config, self.rank, self._init_method = vllm_config, rank, distributed_init_method
        self._name = f"the stage of rank {settings.ranks[rank]} at {settings.remote[rank]}"
        self._offset, self._is_closed = ClockOffset(), False
        logger.info("waiting %.0f s for %s; start `weft serve` there with the same settings", WAIT_S, self._name)
        host, _, port = settings.remote[rank].rpartition(":")
        open_stream = partial(connect, host, int(port), PURPOSE, limit_s=WAIT_S)
        calls, board = open_stream(), open_stream()
        calls.send(CALLS)
        board.send(BOARD)
        self._streams = calls, board
        self._calls = RemoteCalls(calls, self._name)
        Thread(self._follow, settings, name="weft-board").start()
        self._calls.call("start", vllm_config, rank)

    def init_device(self) -> None:
        """Join the group of the worker's host in the stage's place, and initialise the stage."""
        with world_of_one_host():
            init_worker_distributed_environment(self._config, self.rank, self._init_method, 0, "gloo")
        get_pp_group().use_cpu_custom_send_recv = False
        self._calls.call("init_device")

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the stage's KV cache."""
        self._calls.call("initialize_from_config", {self.rank: kv_cache_config})

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute the stage's part of a step: receive hidden states, have them computed, and send the next stage's."""
        group, received = get_pp_group(), None
        if scheduler_output.total_num_scheduled_tokens and not group.is_first_rank:
            tensors = group.recv_tensor_dict()
            assert tensors is not None
            received = packed(tensors)
        output, sent = self._calls.call("execute_model", scheduler_output, received)
        if sent is not None:
            tensors = unpacked(sent)
            self._move_last(tensors[SPANS])
            group.isend_tensor_dict(tensors)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample in the last stage."""
        output = self._calls.call("sample_tokens", grammar_output)
        self._move_last(getattr(output, SPANS, []))
        return output

    def shutdown(self) -> None:
        """End the stage's process, which exists for this connection only."""
        self._is_closed = True
        for stream in self._streams:
            stream.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._calls.call, name)

    def _move_last(self, spans: list[Span]) -> None:
        """Move the stage's own span, which is the last, to the clock of this host."""
        if spans:
            begun_s, ended_s, computed_s = spans[-1]
            spans[-1] = self._offset.here_s(begun_s), self._offset.here_s(ended_s), computed_s

    def _follow(self, settings: WorkerSettings) -> None:
        """Keep the copy of the rank's board. If the connection is lost, end this process, and so the worker."""
        mirror, recorded_s = BoardMirror(settings.boards[self.rank]), 0.0

        def replied() -> None:
            nonlocal recorded_s
            if settings.status_file and time.monotonic() - recorded_s > BEAT_S:
                recorded_s = time.monotonic()
                record(Path(settings.status_file), self.rank)

        try:
            follow_board(self._streams[1], mirror, self._offset, replied)
        except Exception as error:
            mirror.remove()
            if not self._is_closed:
                logger.error("ConnectionError: lost %s: %s", self._name, error)
                os._exit(1)


def stage_worker(vllm_config: Any, local_rank: int, rank: int, *args: Any, **kwargs: Any) -> RemoteStage | StageWorker:
    """Return the worker of stage ``rank``: on this host, or one that forwards calls. See vLLM's `WorkerBase`."""
    remote = WorkerSettings.of(vllm_config.additional_config).remote
    if remote[rank]:
        return RemoteStage(vllm_config, local_rank, rank, *args, **kwargs)
    # A device of this host for each of its ranks.
    return LocalStage(vllm_config, sum(not where for where in remote[:rank]), rank, *args, **kwargs)


class LocalStage(StageWorker):
    """A stage on the worker's host, while others are on other hosts."""

    def init_device(self) -> None:
        """Initialise the device, and groups that reach this host only. See the base class."""
        with world_of_one_host():
            super().init_device()


make_readers_block()
