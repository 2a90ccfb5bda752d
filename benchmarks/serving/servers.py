"""The servers of a benchmark: `weft serve`, and a stock vLLM server to compare with."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from weft.conf.schema import WeftConfig
from weft.inference.board.layout import boards_folder
from weft.inference.worker.command import IN_PROCESS

ARGUMENTS = ["--dtype", "float32", "--no-enable-prefix-caching"]
"""Arguments of every vLLM server: equal prompts are computed again."""
START_S = 900.0
"""Seconds in which a server has to answer after its start."""


def settings_of(config: WeftConfig) -> list[str]:
    """Return the settings of `weft serve`."""
    prefill = config.inference.prefill
    given = {
        "train.name": config.train.name,
        "cluster.ranks": config.cluster.ranks,
        "pipeline.stages": config.pipeline.stages,
        "inference.prefill.model": prefill.model,
        "inference.prefill.python": prefill.python,
        "inference.prefill.ranks": f"[{','.join(map(str, prefill.ranks))}]",
        "inference.prefill.stages": prefill.stages,
        "inference.prefill.cost_dir": prefill.cost_dir,
        "inference.prefill.first_port": prefill.first_port,
        "inference.prefill.yield_cores": prefill.yield_cores,
        "inference.prefill.arguments": f"[{','.join(map(repr, ARGUMENTS))}]",
    }
    if config.inference.decode.enabled:
        given["inference.decode.arguments"] = given["inference.prefill.arguments"]
        given["inference.decode.port"] = config.inference.decode.port
        given["inference.controller.max_queue"] = config.inference.controller.max_queue
    return [f"{name}={value}" for name, value in given.items()]


@contextlib.contextmanager
def weft_server(config: WeftConfig, *options: str, key: str) -> Iterator[subprocess.Popen]:
    """Run `weft serve` until the block ends, and remove its boards."""
    words = [sys.executable, "-m", "weft.tools.cli", "serve", *options, *settings_of(config)]
    try:
        with _running(words, os.environ | {config.inference.controller.api_key_env: key}) as process:
            yield process
    finally:
        shutil.rmtree(boards_folder(config, os.getuid()), ignore_errors=True)


@contextlib.contextmanager
def stock_server(config: WeftConfig, port: int, log: Path) -> Iterator[subprocess.Popen]:
    """Run a stock vLLM server of the same model, with the workers' arguments."""
    prefill = config.inference.prefill
    words = [prefill.python, "-m", "vllm.entrypoints.openai.api_server", "--model", prefill.model, "--port", str(port)]
    words += ["--max-model-len", str(prefill.max_tokens), "--max-num-batched-tokens", str(prefill.max_tokens)]
    words += ["--kv-cache-memory-bytes", str(prefill.kv_cache_bytes), "--enforce-eager", *ARGUMENTS]
    words += ["--distributed-executor-backend", IN_PROCESS]
    with log.open("wb") as out, _running(words, os.environ | {"VLLM_NO_USAGE_STATS": "1"}, out) as process:
        yield process


@contextlib.contextmanager
def _running(words: Sequence[str], env: dict[str, str], out: object = None) -> Iterator[subprocess.Popen]:
    env.pop("WEFT_EMULATED_GPUS", None)  # which only training has
    process = subprocess.Popen(words, env=env, stdout=out, stderr=out)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def until_ready(urls: Sequence[str], process: subprocess.Popen) -> None:
    """Wait until all servers answer with success. Raise RuntimeError if a server does not, or its process has ended."""
    deadline_s = time.monotonic() + START_S
    for url in urls:
        while True:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{url}: the server did not start; a worker's log is in the folder of the boards")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
