"""The vLLM servers of a run: which ranks each shares devices with, where it listens, how it is started."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.conf.boards import boards_folder
from weft.conf.hosts import working_hosts
from weft.conf.schema import KvConnector, PrefillWorkerConfig, WeftConfig
from weft.inference.board.layout import board_path
from weft.inference.worker.settings import WorkerSettings

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine's own process. vLLM's default on a CPU is a process more, which
polls for a second after each step, in training's time."""

LEASE_S = 120
"""Seconds for which a prompt's KV cache is kept for a decode instance that has not fetched it yet; vLLM's 30 are
short for one that shares a busy host."""


@dataclass(frozen=True)
class Worker:
    """One vLLM server.

    Attributes:
        index: its number on this host.
        ranks: training ranks whose devices it uses.
        port: where it listens.
        side_port: where its NIXL connector meets decode instances.
        status: where its engine says that it lives.
        boards: their bubble boards.
    """

    index: int
    ranks: tuple[int, ...]
    port: int
    side_port: int
    status: Path
    boards: tuple[Path, ...]


def workers_of(config: WeftConfig) -> tuple[Worker, ...]:
    """The workers that `weft serve` starts on this host."""
    prefill, each = config.inference.prefill, config.inference.prefill.ranks_per_worker
    ranks = prefill.ranks or list(range(config.cluster.ranks))
    folder = boards_folder(config, os.getuid())
    groups = [tuple(ranks[first : first + each]) for first in range(0, len(ranks), each)]
    return tuple(
        Worker(
            index=index,
            ranks=group,
            port=prefill.first_port + index,
            side_port=prefill.first_side_port + index,
            status=(folder / f"worker{index}.status").absolute(),
            boards=tuple(board_path(folder, rank).absolute() for rank in group),
        )
        for index, group in enumerate(groups)
    )


def addresses(config: WeftConfig) -> list[PrefillWorkerConfig]:
    """The workers as the controller sees them: those that are named, or those that `weft serve` starts."""
    return list(config.inference.controller.workers) or [
        PrefillWorkerConfig(
            url=f"http://{config.inference.prefill.host}:{worker.port}",
            boards=[str(board) for board in worker.boards],
            cost=str(cost_file(config, worker)),
        )
        for worker in workers_of(config)
    ]


def settings_of(config: WeftConfig, worker: Worker, *, trace_file: str = "") -> WorkerSettings:
    """What the scheduler plug-in of a worker is told."""
    prefill = config.inference.prefill
    return WorkerSettings(
        boards=tuple(map(str, worker.boards)),
        guard_s=prefill.guard_s,
        quantile=prefill.quantile,
        cost_file=str(cost_file(config, worker)),
        status_file=str(worker.status),
        allow_decode=prefill.allow_decode,
        trace_file=trace_file,
    )


def cost_file(config: WeftConfig, worker: Worker) -> Path:
    """Where the cost model of this model, machine and worker is kept."""
    prefill = config.inference.prefill
    digest = hashlib.sha256(prefill.model.encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", f"{Path(prefill.model).name}-{digest}-{platform.node()}-{worker.index}")
    return Path(prefill.cost_dir).expanduser().absolute() / f"{name}.json"


def command(config: WeftConfig, worker: Worker, *, python: str, num_gpus: int, trace_file: str = "") -> list[str]:
    """The call that starts a worker: a stock vLLM server with Weft's plug-ins.

    Args:
        python: the one that has vLLM.
        num_gpus: 0 serves on the CPU.
        trace_file: where each step is noted; empty is nowhere.
    """
    prefill = config.inference.prefill
    settings = settings_of(config, worker, trace_file=trace_file)
    options = {
        "--model": prefill.model,
        "--host": prefill.host,
        "--port": worker.port,
        "--max-model-len": prefill.max_tokens,
        "--max-num-batched-tokens": prefill.max_tokens,
        "--scheduler-cls": "weft.inference.worker.vllm_scheduler.BubbleScheduler",
        "--additional-config": json.dumps(settings.to_additional_config()),
        "--middleware": f"weft.inference.worker.vllm_door.{'Door' if prefill.allow_decode else 'PrefillOnly'}",
    }
    if num_gpus:
        options["--gpu-memory-utilization"] = prefill.memory_share
        options["--tensor-parallel-size"] = len(worker.ranks)
    else:
        options["--kv-cache-memory-bytes"] = prefill.kv_cache_bytes
        options["--distributed-executor-backend"] = IN_PROCESS
    if prefill.connector is KvConnector.nixl:
        options["--kv-transfer-config"] = json.dumps(kv_transfer(on_cpu=not num_gpus))
    # Compiling and capturing graphs would take the device for minutes at each restart, in
    # training's time.
    flags = ["--no-async-scheduling", "--enforce-eager"]
    listed = [text for name, value in options.items() for text in (name, str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *listed, *flags, *prefill.arguments]


def kv_transfer(*, on_cpu: bool) -> dict[str, object]:
    """The value of `--kv-transfer-config`, for prefill and decode instances alike."""
    config: dict[str, object] = {
        "kv_connector": "QuietNixlConnector",
        "kv_connector_module_path": "weft.inference.worker.vllm_nixl",
        "kv_role": "kv_both",
        # Its hash includes the path by which each instance names the model.
        "kv_connector_extra_config": {"enforce_handshake_compat": False, "kv_lease_duration": LEASE_S},
    }
    return config | ({"kv_buffer_device": "cpu"} if on_cpu else {})


def environment(
    config: WeftConfig, worker: Worker, outer: Mapping[str, str], *, package: Path, devices: Sequence[str] = ()
) -> dict[str, str]:
    """The variables that a worker is started with.

    Args:
        package: a folder that holds the package `weft`, for a Python that does not have it.
        devices: GPUs of this host as CUDA_VISIBLE_DEVICES names them, in the order of its ranks; none serves on
            the CPU.

    Raises:
        ValueError: a rank has no GPU here.
    """
    env = dict(outer)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), env.get("PYTHONPATH", "")]))
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = config.inference.prefill.host
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(worker.side_port)
    env["WEFT_WORKER_STATUS"] = str(worker.status)
    if key := outer.get(config.inference.controller.api_key_env):
        env["VLLM_API_KEY"] = key
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices_of(config, worker, devices))
    return env


def devices_of(config: WeftConfig, worker: Worker, devices: Sequence[str]) -> list[str]:
    """The GPUs of a worker's ranks: of the host's, in order, those that the ranks train on.

    Raises:
        ValueError: there are fewer.
    """
    first = _first_rank(config, worker)
    if max(worker.ranks) - first >= len(devices):
        raise ValueError(
            f"inference.prefill.ranks={list(worker.ranks)}: this host has {len(devices)} GPUs "
            f"({','.join(devices)}) for its ranks from {first} on; name ranks that train here"
        )
    return [devices[rank - first] for rank in worker.ranks]


def _first_rank(config: WeftConfig, worker: Worker) -> int:
    """The first rank of the host that a worker's ranks are on."""
    first = 0
    for slots in working_hosts(config.cluster).values() if config.cluster.hostfile else ():
        if worker.ranks[0] < first + slots:
            break
        first += slots
    return first
