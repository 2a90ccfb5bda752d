"""The process of a pipeline stage whose worker is on another host: `python -m weft.inference.worker.vllm_stage_host`.

It waits for the worker's `RemoteStage`, executes its calls with a `StageWorker`, and sends news of its rank's bubble
board. It ends with the connection. `weft serve` then starts another one for the next worker.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.config.logging import LoggingConfig
from vllm.distributed import get_pp_group
from vllm.logger import configure_logging, init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import WorkerWrapperBase

from weft.comm.message_stream import STALL_S, Listener, MessageStream, address_towards
from weft.inference.board.mirror import serve_board
from weft.inference.worker.host_tensors import packed, unpacked
from weft.inference.worker.remote_calls import serve_calls
from weft.inference.worker.settings import SETTINGS_VARIABLE, WorkerSettings
from weft.inference.worker.vllm_remote_stage import CALLS, PURPOSE
from weft.inference.worker.vllm_worlds import world_alone

logger = init_logger(f"vllm.{__name__}")


class HostedStage:
    """The stage, with its process group's place taken by arguments and results."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Create the host of a stage. ``settings`` are this host's, whose paths may differ from the worker's."""
        self._settings = replace(settings, status_file="", remote=())
        self._rank = 0
        self._received: dict[str, Any] | None = None
        self._sent: dict[str, Any] | None = None
        self._worker: WorkerWrapperBase
        self._own: dict[str, Callable[..., Any]] = {
            "start": self._start,
            "init_device": self._init_device,
            "load_model": self._load_model,
            "execute_model": self._execute_model,
        }

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Execute a call of `RemoteStage`."""
        method = self._own.get(name) or getattr(self._worker, name)
        return method(*args, **kwargs)

    def _start(self, vllm_config: Any, rank: int) -> None:
        self._rank, self._config = rank, vllm_config
        vllm_config.additional_config = self._settings.to_additional_config()
        vllm_config.parallel_config.worker_cls = "weft.inference.worker.vllm_stage.StageWorker"
        self._worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
        arguments = {
            "vllm_config": vllm_config,
            "local_rank": 0,
            "rank": rank,
            "distributed_init_method": "",
            "is_driver_worker": True,
            "shared_worker_lock": multiprocessing.get_context("spawn").Lock(),
        }
        self._worker.init_worker([arguments])

    def _init_device(self) -> None:
        with world_alone(self._rank, self._config.parallel_config.world_size):
            self._worker.init_device()
        group = get_pp_group()
        group.irecv_tensor_dict = lambda **_: (self._received, [], [])
        group.isend_tensor_dict = self._send

    def _load_model(self, *args: Any, **kwargs: Any) -> None:
        self._worker.load_model(*args, **kwargs)
        current_platform.update_block_size_for_backend(self._config)  # as `WorkerProc` does

    def _execute_model(self, scheduler_output: Any, received: dict[str, Any] | None) -> tuple[Any, Any]:
        self._received, self._sent = unpacked(received) if received is not None else None, None
        output = self._worker.execute_model(scheduler_output)
        return output, self._sent

    def _send(self, tensors: Mapping[str, Any], **_: Any) -> list[Any]:
        self._sent = packed(tensors)
        return [None]


def main() -> None:
    """Compute a stage for one worker, until the connection to it is lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, required=True, help="number of the stage")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--server", required=True, help="the worker's host")
    known = parser.parse_args()
    configure_logging(LoggingConfig())
    settings = WorkerSettings.of(json.loads(os.environ[SETTINGS_VARIABLE]))
    rank = settings.ranks[known.stage]
    callers: queue.Queue[MessageStream] = queue.Queue()
    is_taken = threading.Lock()

    def welcome(stream: MessageStream) -> None:
        try:
            if stream.receive(limit_s=STALL_S, most=len(CALLS)) == CALLS:
                if is_taken.acquire(blocking=False):
                    callers.put(stream)
                else:  # another worker, or this one's next, before the loss of its last connection has been noticed
                    stream.close()
                return
            serve_board(stream, settings.boards[known.stage])
        except OSError as error:
            logger.info("the worker of the stage of rank %d has gone: %s", rank, error)
            os._exit(0)

    host = address_towards(known.server, known.port)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    listener = Listener(host, known.port, PURPOSE, welcome)
    logger.info("the stage of rank %d waits at %s:%d for its worker on %s", rank, *listener.address, known.server)
    try:
        serve_calls(callers.get(), HostedStage(settings).call)
    except OSError as error:
        logger.info("the worker of the stage of rank %d has gone: %s", rank, error)
    os._exit(0)


if __name__ == "__main__":
    main()
