"""The vLLM servers of a run: their ranks, addresses and command lines."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.conf.host.private import private_folder, shared_key
from weft.conf.hosts import run_folder
from weft.conf.inference_checks import scored_model
from weft.conf.schema import KvConnector, Precision, PrefillConfig, PrefillWorkerConfig, WeftConfig
from weft.engine.observability.event_ring import rings_folder
from weft.inference.board.layout import boards_folder
from weft.inference.requests import UNSENDABLE, is_sendable
from weft.inference.worker.score_arrays import SPARE
from weft.inference.worker.scorer import Scorer
from weft.inference.worker.settings import SETTINGS_VARIABLE, WorkerSettings
from weft.inference.worker.vllm_weights import FOLDER_VARIABLE
from weft.inference.worker.workers import StageHost, Worker, first_rank_here, workers_of

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs the model in the engine's process. vLLM's default on a CPU is a separate process, which polls
for a second after each step and takes time from training."""

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(^|,)\s*expandable_segments\s*:\s*true\s*(?=,|$)", re.IGNORECASE)

KEY_FILE = "serving.key"
"""File in the folder of boards with a key that `weft serve` and `weft controller` share."""

VLLM_DTYPES = {Precision.fp32: "float32", Precision.bf16: "bfloat16", Precision.fp16: "float16"}
"""vLLM's name for each precision of training, in which workers evaluate."""

LEASE_S = 120
"""Seconds that a prompt's KV cache is kept until a decode instance has fetched it; vLLM's default of 30 is too
short on a busy host."""

WAN_MBPS = "weft_wan_mbps"
"""Key of the connector's settings with `inference.prefill.cache_mbps`; without it NIXL sends caches."""

SPANNING = "vllm_remote_stage.stage_worker"
"""Creates the stages of a worker of which some are on other hosts."""

UNLOGGED = "--uvicorn-log-level=error"
"""Without a line for each request, health check, or text of a stranger that is not HTTP: logs are in shared memory."""

STAGE_TIMEOUT_S = 86400
"""Longest wait for a step, in seconds: a step in a pipeline waits as long as training keeps a rank busy."""


def addresses(config: WeftConfig) -> list[PrefillWorkerConfig]:
    """Return the workers of the controller: the configured ones, or those that `weft serve` starts."""
    return list(config.inference.controller.workers) or [
        PrefillWorkerConfig(
            url=worker_url(config.inference.prefill, worker),
            boards=[str(board) for board in worker.boards],
            stages=config.inference.prefill.stages,
            cost=str(cost_link(worker.status)),
        )
        for worker in workers_of(config)
    ]


def worker_url(prefill: PrefillConfig, worker: Worker) -> str:
    """Return the URL of a worker of this host: HTTPS if its arguments have a certificate."""
    is_secure = any(argument.partition("=")[0].replace("_", "-") == "--ssl-certfile" for argument in prefill.arguments)
    return f"{'https' if is_secure else 'http'}://{prefill.host}:{worker.port}"


def controller_url(config: WeftConfig) -> str:
    """Return the URL of the controller."""
    settings = config.inference.controller
    return f"{'https' if settings.ssl_certfile else 'http'}://{settings.host}:{settings.port}"


def api_key(variable: str, environment: Mapping[str, str]) -> str:
    """Return the API key in an environment variable, or an empty string.

    Raises:
        ValueError: an HTTP header cannot carry it.
    """
    key = environment.get(variable, "") if variable else ""
    if not is_sendable(key):
        raise ValueError(f"{variable}: {UNSENDABLE}")
    return key


def server_key(config: WeftConfig, outer: Mapping[str, str]) -> str:
    """Return the API key of workers and decode server: the configured one, or one that this user's processes share.

    Without it any user of this host could use servers that listen on a loopback address.
    """
    configured = api_key(config.inference.controller.api_key_env, outer)
    return configured or shared_key(private_folder(boards_folder(config, os.getuid())) / KEY_FILE)


def settings_of(config: WeftConfig, worker: Worker, *, trace_file: str = "") -> WorkerSettings:
    """Return the settings of a worker's scheduler plug-in."""
    prefill = config.inference.prefill
    return WorkerSettings(
        boards=tuple(map(str, worker.boards)),
        guard_s=prefill.guard_s,
        quantile=prefill.quantile,
        cost_file=str(cost_file(config, worker)),
        stages=prefill.stages,
        status_file=str(worker.status),
        allow_decode=prefill.allow_decode,
        outlives_training=config.inference.evaluate.enabled,
        trace_file=trace_file,
        rings=str(rings_folder(run_folder(config))),
        ranks=worker.ranks,
        remote=worker.remote if any(worker.remote) else (),
    )


def cost_file(config: WeftConfig, worker: Worker) -> Path:
    """Return the path of the cost model for this model, machine and worker."""
    prefill = config.inference.prefill
    digest = hashlib.sha256(prefill.model.encode()).hexdigest()[:8]
    part = f"-of{prefill.stages}" if prefill.stages > 1 else ""
    whole = f"{Path(prefill.model).name}-{digest}-{platform.node()}-{worker.index}{part}"
    name = re.sub(r"[^A-Za-z0-9.-]+", "_", whole)
    return Path(prefill.cost_dir).expanduser().absolute() / f"{name}.json"


def cost_link(status: Path) -> Path:
    """Return the path under which a worker publishes its cost model to controllers, independent of the model's name.

    Args:
        status: path of the worker's `WorkerStatus`.
    """
    return status.with_suffix(".cost")


def stage_file(file: Path, stage: int) -> Path:
    """Return the path of a stage's cost model, which is ``file`` for the first stage."""
    return file.with_name(f"{file.stem}.stage{stage}{file.suffix}") if stage else file


def interpreter(prefill: PrefillConfig) -> str:
    """Return the absolute path of the Python that runs vLLM, because servers run in another folder."""
    return str(Path(prefill.python).expanduser().absolute()) if prefill.python else sys.executable


def weights_folder(config: WeftConfig) -> Path:
    """Return the folder with the weights of a run's checkpoints that its workers load."""
    return run_folder(config) / "evaluation"


def newest_weights(config: WeftConfig) -> Path | None:
    """Return the newest weights in `weights_folder`, or None if there are none yet."""
    folder = weights_folder(config)
    names = [path.name for path in folder.iterdir() if path.name[0] != "."] if folder.is_dir() else []
    return folder / max(names) if names else None


def with_scored_model(config: WeftConfig) -> WeftConfig:
    """Return the configuration with the model that scores for training as the workers' model, if workers score."""
    if not config.inference.scores.enabled:
        return config
    prefill = replace(config.inference.prefill, model=scored_model(config))
    return replace(config, inference=replace(config.inference, prefill=prefill))


def scorers(config: WeftConfig) -> list[Scorer]:
    """Return the workers as they score text for training."""
    key, model = server_key(config, os.environ), with_scored_model(config).inference.prefill.model
    return [Scorer(worker.url, key, model) for worker in addresses(config)]


def with_newest_weights(config: WeftConfig) -> WeftConfig:
    """Return the configuration with the newest weights of the run as the workers' model, if workers evaluate."""
    if not config.inference.evaluate.enabled:
        return config
    prefill = replace(config.inference.prefill, model=str(newest_weights(config) or ""))
    return replace(config, inference=replace(config.inference, prefill=prefill))


def model_options(prefill: PrefillConfig) -> dict[str, object]:
    """Return a server's options that name the model: a folder by its absolute path, under the name in the settings."""
    folder = Path(prefill.model).expanduser()
    path = str(folder.absolute()) if folder.is_dir() else prefill.model
    named = {} if path == prefill.model else {"--served-model-name": prefill.model}
    return {"--model": path, **named}


def command(config: WeftConfig, worker: Worker, *, python: str, num_gpus: int, trace_file: str = "") -> list[str]:
    """Return the command line of a worker: a stock vLLM server with Weft's plug-ins.

    Args:
        python: an interpreter with vLLM.
        num_gpus: 0 serves on the CPU.
        trace_file: log of steps, or empty for none.
    """
    prefill = config.inference.prefill
    settings = settings_of(config, worker, trace_file=trace_file)
    middleware = "ApiMiddleware" if prefill.allow_decode else "PrefillOnlyMiddleware"
    options = model_options(prefill) | {
        "--host": prefill.host,
        "--port": worker.port,
        "--max-model-len": prefill.max_tokens,
        "--max-num-batched-tokens": prefill.max_tokens,
        "--scheduler-cls": "weft.inference.worker.vllm_scheduler.BubbleScheduler",
        "--additional-config": json.dumps(settings.to_additional_config()),
        "--middleware": f"weft.inference.worker.vllm_middleware.{middleware}",
    }
    if config.inference.scores.enabled:
        options["--dtype"] = VLLM_DTYPES[config.train.precision]
        options["--max-logprobs"] = config.distill.top_k + SPARE
    if config.inference.evaluate.enabled:
        options |= {
            "--served-model-name": config.train.name,
            "--dtype": VLLM_DTYPES[config.train.precision],
            "--worker-cls": "weft.inference.worker.vllm_stored.StoredWorker",
            "--load-format": "weft",
        }
    if num_gpus:
        options["--gpu-memory-utilization"] = prefill.memory_share
        options["--tensor-parallel-size"] = prefill.ranks_per_worker
    else:
        options["--kv-cache-memory-bytes"] = prefill.kv_cache_bytes // prefill.stages
        options["--distributed-executor-backend"] = IN_PROCESS
    if prefill.stages > 1:
        options |= {
            "--pipeline-parallel-size": prefill.stages,
            "--distributed-executor-backend": "mp",
            "--worker-cls": f"weft.inference.worker.{SPANNING if any(worker.remote) else 'vllm_stage.StageWorker'}",
        }
    if prefill.connector is not KvConnector.none:
        options["--kv-transfer-config"] = json.dumps(kv_transfer(prefill, on_cpu=not num_gpus))
    # Compiling and capturing graphs would take device time from training for minutes at each restart.
    flags = ["--no-async-scheduling", "--enforce-eager", UNLOGGED]
    listed = [text for name, value in options.items() for text in (name, str(value))]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *listed, *flags, *prefill.arguments]


def stage_command(stage: StageHost, *, python: str) -> list[str]:
    """Return the command line of a stage of another host's worker."""
    options = {"--stage": stage.stage, "--port": stage.port, "--server": stage.server}
    return [
        python,
        "-m",
        "weft.inference.worker.vllm_stage_host",
        *(str(word) for each in options.items() for word in each),
    ]


def kv_transfer(prefill: PrefillConfig, *, on_cpu: bool, enforce: bool = False) -> dict[str, object]:
    """Return the value of `--kv-transfer-config`, for prefill and decode instances.

    A decode instance reads the cache of a worker of one stage, and is sent those of several.

    Args:
        enforce: True fetches no cache from an instance of another model path, number format or version of vLLM.
    """
    wan = {WAN_MBPS: prefill.cache_mbps} if prefill.connector is KvConnector.wan else {}
    config: dict[str, object] = {
        "kv_connector": "QuietNixlConnector" if prefill.stages == 1 else "QuietNixlPushConnector",
        "kv_connector_module_path": "weft.inference.worker.vllm_nixl",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"enforce_handshake_compat": enforce, "kv_lease_duration": LEASE_S, **wan},
        # A decode instance computes a prompt itself if the prompt's worker ends before the cache is fetched.
        "kv_load_failure_policy": "recompute",
    }
    return config | ({"kv_buffer_device": "cpu"} if on_cpu or wan else {})


def environment(
    config: WeftConfig,
    worker: Worker,
    outer: Mapping[str, str],
    *,
    key: str,
    package: Path,
    devices: Sequence[str] = (),
) -> dict[str, str]:
    """Return the environment of a worker.

    Args:
        key: API key that the server requires.
        package: a folder that contains the package `weft`, for an interpreter without it.
        devices: GPUs of this host as CUDA_VISIBLE_DEVICES names them, in the order of its ranks. Empty serves on the
            CPU.

    Raises:
        ValueError: a rank has no GPU on this host.
    """
    env = server_environment(config, outer, key=key, package=package, side_port=worker.side_port)
    # The model runs eagerly. vLLM also compiles helpers, which takes seconds at the first request that needs them.
    env.setdefault("TORCH_COMPILE_DISABLE", "1")
    env["WEFT_WORKER_STATUS"] = str(worker.status)
    env[SETTINGS_VARIABLE] = json.dumps(settings_of(config, worker).to_additional_config())
    if config.inference.evaluate.enabled:
        env[FOLDER_VARIABLE] = config.inference.prefill.model
    if config.inference.evaluate.enabled or config.inference.scores.enabled:
        env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # a token after the last position, which is never computed
    if config.inference.prefill.stages > 1:
        env.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(STAGE_TIMEOUT_S))
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise each stage needs cores of its own
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices_of(config, worker, devices))
    return env


def server_environment(
    config: WeftConfig, outer: Mapping[str, str], *, key: str, package: Path, side_port: int
) -> dict[str, str]:
    """Return what the environments of workers and decode server have in common. See `environment`."""
    env = dict(outer)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package), env.get("PYTHONPATH", "")]))
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    if config.inference.prefill.connector is not KvConnector.none:
        env.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # one core is left to the connector's threads
        # vLLM refuses segments that move, because the connector registers their addresses; training may use them.
        for name in ALLOCATORS:
            if (fixed := _EXPANDABLE.sub("", env.get(name, "")).strip(", ")) != env.get(name, ""):
                env[name] = fixed
    env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = config.inference.prefill.host
    env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
    env["VLLM_API_KEY"] = key
    return env


def devices_of(config: WeftConfig, worker: Worker, devices: Sequence[str]) -> list[str]:
    """Return the GPUs that a worker's ranks train on. Raise ValueError if there are fewer."""
    first = first_rank_here(config.cluster, worker)
    ranks = worker.ranks_here
    if max(ranks) - first >= len(devices):
        raise ValueError(
            f"inference.prefill.ranks={list(ranks)}: this host has {len(devices)} GPUs "
            f"({','.join(devices)}) for its ranks from {first} on; name ranks that train here"
        )
    return [devices[rank - first] for rank in ranks]
