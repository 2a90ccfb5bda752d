"""`weft serve`: starts a vLLM server for each training rank or group of ranks, and restarts servers that end.

With a decode server and the controller, all of them are one OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import weft
from weft.conf import load
from weft.conf.host.files import replacing
from weft.conf.host.private import private_folder
from weft.conf.host.processes import end_with_parent
from weft.conf.schema import KvConnector, WeftConfig
from weft.inference.board.layout import boards_folder
from weft.inference.worker.command import (
    command,
    controller_url,
    devices_of,
    environment,
    interpreter,
    newest_weights,
    server_key,
    stage_command,
    with_newest_weights,
    with_scored_model,
    worker_url,
)
from weft.inference.worker.decoder import decode_command, decode_environment, decode_url
from weft.inference.worker.workers import StageHost, Worker, stage_hosts_of, workers_of
from weft.recipes.serving.checks import (
    check_certificate,
    check_decode,
    check_decode_gpus,
    check_engine,
    check_memory,
    check_ports,
    check_serving,
    check_stage_hosts,
    least_gpu_bytes,
    warnings_of,
)
from weft.recipes.serving.processes import (
    PROBE_S,
    Launch,
    ServerProcess,
    own_servers,
    run_below_ranks,
    run_on_idle_cores,
)
from weft.tools.launch_arguments import visible_gpus

POLL_S = 0.5
GRACE_S = 10.0
WITH_DECODE = ("inference.decode.enabled=true", "inference.prefill.connector=nixl")
"""Settings of `--with-decode`."""


def main(argv: Sequence[str]) -> int:
    """Run ``[--with-decode] [--trace FOLDER] [recipe=NAME] [key=value ...]`` until SIGINT or SIGTERM.

    It needs the same settings as `weft launch`, to locate the boards. It may be started before, during or after
    training, and stopped at any time. With a decode server, accepted requests are answered before it ends, unless
    there is a second signal.

    Raises:
        ValueError: the input is invalid, which is found before any process starts, or no worker could be started. With
            a decode server, a server could not be started.
    """
    parser = argparse.ArgumentParser(
        prog="weft serve",
        usage="weft serve [--with-decode] [--trace FOLDER] [recipe=NAME] [key=value ...]",
        description="Run vLLM prefill workers in the bubbles of a training run, until Ctrl-C. Pass the same settings "
        "as to `weft launch`.",
    )
    parser.add_argument(
        "--with-decode",
        action="store_true",
        help="also run a decode server and the controller: one OpenAI-compatible address for whole answers",
    )
    parser.add_argument(
        "--trace", metavar="FOLDER", help="write a record of every prefill step to worker<N>.jsonl in this folder"
    )
    known, overrides = parser.parse_known_args(argv)
    if known.with_decode:
        is_chosen = load(overrides).inference.prefill.connector is not KvConnector.none
        overrides += WITH_DECODE[:1] if is_chosen else WITH_DECODE
    config = _without_front(with_scored_model(load(overrides)))
    _check(config)
    is_whole = config.inference.decode.enabled
    most = {"max_starts": 1} if is_whole else {}
    servers = [worker_server(config, worker, known.trace, **most) for worker in workers_of(config)]
    servers += [_stage_server(config, stage) for stage in stage_hosts_of(config)]
    front = [_controller_server(config, overrides)] if is_whole else []
    evaluates = config.inference.evaluate.enabled
    if evaluates:
        front.append(_evaluation(config, overrides))
    if is_whole and not config.inference.decode.url:
        servers.append(_decode_server(config))
    readiness = _Readiness(config)
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    try:
        while not stopped:
            # Workers that evaluate start with the weights of a checkpoint.
            for server in front if evaluates and newest_weights(config) is None else servers + front:
                server.check()
            failures = [server.failure for server in servers + front if server.failure]
            if failures and (is_whole or len(failures) == len(servers)):
                raise ValueError(failures[0])
            if is_whole:
                readiness.check()
            time.sleep(POLL_S)
        if is_whole:
            _drain(front[0], config.inference.controller.drain_s + GRACE_S, stopped)
    finally:
        for server in servers + front:
            server.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        for server in servers + front:
            server.end(deadline_s)
    return 0


def _drain(controller: ServerProcess, most_s: float, stopped: Sequence[int]) -> None:
    """Let the controller answer what it has accepted, while its servers run; until a second signal."""
    controller.send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + most_s
    while controller.is_running and time.monotonic() < deadline_s and len(stopped) < 2:
        time.sleep(0.1)


def check_gpus(config: WeftConfig, devices: Sequence[str]) -> None:
    """Print the GPU memory of a worker and of training, and warnings about settings that slow training down.

    Raises:
        ValueError: worker and training do not fit into a GPU's memory, or a rank or the decode server has no GPU of
            its own on this host.
    """
    for worker in (*workers_of(config), *(stage.worker for stage in stage_hosts_of(config))):
        devices_of(config, worker, devices)
    check_decode_gpus(config, devices)
    if total := least_gpu_bytes(devices):
        print(check_memory(config, total, _training_bytes(config)), flush=True)
    for warning in warnings_of(os.environ):
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _training_bytes(config: WeftConfig) -> float:
    from weft.tools.dry_run import most_bytes  # imports torch, which serving on CPUs does not need

    try:
        return most_bytes(config)
    except ValueError as error:
        print(f"warning: cannot predict the memory of training: {error}", file=sys.stderr, flush=True)
        return 0.0


class _Readiness:
    """Prints when the controller's address serves requests, and who computes their prompts."""

    def __init__(self, config: WeftConfig) -> None:
        self._url = controller_url(config)
        self._probed_s, self._printed = 0.0, ""

    def check(self) -> None:
        if (now_s := time.monotonic()) - self._probed_s < PROBE_S:
            return
        self._probed_s = now_s
        try:
            with urllib.request.urlopen(f"{self._url}/ready", timeout=PROBE_S, context=own_servers()) as response:
                state = json.load(response)
        except urllib.error.HTTPError:
            text = "the decode server does not answer" if self._printed else ""
        except (OSError, ValueError):
            text = ""
        else:
            who = (
                "workers compute prompts in bubbles"
                if state["serving"]
                else "no training publishes bubbles, so the decode server computes prompts itself"
            )
            text = f"ready, {who}"
        if text and text != self._printed:
            self._printed = text
            print(f"{self._url}: {text}", flush=True)


def worker_server(config: WeftConfig, worker: Worker, trace: str | None, **options: int) -> ServerProcess:
    """Return a prefill worker's process, not started."""
    url = worker_url(config.inference.prefill, worker)
    note = f" (rank {', '.join(map(str, worker.ranks))})"
    if remote := [where for where in worker.remote if where]:
        note += f", with stages at {', '.join(remote)}, where `weft serve` has to run as well"
    launch = partial(_worker_launch, config, worker, trace)
    return ServerProcess(f"worker {worker.index}", url, launch, note=note, **options)


def _worker_launch(config: WeftConfig, worker: Worker, trace: str | None) -> Launch:
    config = with_newest_weights(config)
    folder = private_folder(boards_folder(config, os.getuid()))
    devices, python = visible_gpus(), interpreter(config.inference.prefill)
    trace_file = str(Path(trace, f"worker{worker.index}.jsonl").absolute()) if trace else ""
    return Launch(
        words=command(config, worker, python=python, num_gpus=len(devices), trace_file=trace_file),
        env=environment(
            config,
            worker,
            os.environ,
            key=server_key(config, os.environ),
            package=_package(folder),
            devices=devices,
        ),
        folder=folder,
        log=folder / f"worker{worker.index}.log",
        become=_yielding(config) if not devices else run_below_ranks,
    )


def _stage_server(config: WeftConfig, stage: StageHost) -> ServerProcess:
    """Return the process of a stage of another host's worker, not started. It ends when the worker ends."""

    def launch() -> Launch:
        folder = private_folder(boards_folder(config, os.getuid()))
        devices, key, package = visible_gpus(), server_key(config, os.environ), _package(folder)
        return Launch(
            words=stage_command(stage, python=interpreter(config.inference.prefill)),
            env=environment(config, stage.worker, os.environ, key=key, package=package, devices=devices),
            folder=folder,
            log=folder / f"stage{stage.rank}.log",
            become=_yielding(config) if not devices else run_below_ranks,
        )

    name = f"stage {stage.stage} of the worker of {stage.server}"
    note = f" (rank {stage.rank}) on port {stage.port}"
    return ServerProcess(name, "", launch, note=note, max_starts=sys.maxsize)


def _check(config: WeftConfig) -> None:
    """Raise ValueError if servers cannot be started with these settings on this host."""
    check_serving(config)
    check_stage_hosts(config)
    check_decode(config)
    check_certificate(config)
    check_ports(config)
    check_engine(config)
    if devices := visible_gpus():
        check_gpus(config, devices)


def _without_front(config: WeftConfig) -> WeftConfig:
    """Return the configuration, without a decode server where there are only stages of other hosts' workers."""
    if workers_of(config) or not stage_hosts_of(config):
        return config
    decode = replace(config.inference.decode, enabled=False)
    return replace(config, inference=replace(config.inference, decode=decode))


def _yielding(config: WeftConfig) -> Callable[[], None]:
    """Return what a process that competes with ranks for cores does at its start."""
    return run_on_idle_cores if config.inference.prefill.yield_cores else run_below_ranks


def _decode_server(config: WeftConfig) -> ServerProcess:
    def launch() -> Launch:
        folder = private_folder(boards_folder(config, os.getuid()))
        return Launch(
            words=decode_command(config, python=interpreter(config.inference.prefill)),
            env=decode_environment(config, os.environ, key=server_key(config, os.environ), package=_package(folder)),
            folder=folder,
            log=folder / "decode.log",
            become=run_below_ranks,
        )

    return ServerProcess("decode server", decode_url(config.inference.decode), launch, max_starts=1)


def _controller_server(config: WeftConfig, overrides: Sequence[str]) -> ServerProcess:
    launch = partial(_launch, config, ["controller", *overrides], "controller.log", end_with_parent)
    return ServerProcess("controller", controller_url(config), launch, max_starts=1)


def _evaluation(config: WeftConfig, overrides: Sequence[str]) -> ServerProcess:
    launch = partial(_launch, config, ["evaluate", *overrides], "evaluation.log", _yielding(config))
    return ServerProcess("evaluation", "", launch)


def _launch(config: WeftConfig, words: Sequence[str], log: str, become: Callable[[], None]) -> Launch:
    """Return how to start a command of `weft`, whose output goes to a file beside the boards."""
    return Launch(
        words=[sys.executable, "-m", "weft.tools.cli", *words],
        env=os.environ,
        folder=None,
        log=private_folder(boards_folder(config, os.getuid())) / log,
        become=become,
    )


def _package(folder: Path) -> Path:
    """Return a folder that has only a link named `weft` to this package, from which workers import it."""
    link = private_folder(folder / "package") / "weft"
    with replacing(link) as draft:
        draft.symlink_to(Path(weft.__file__).parent.absolute(), target_is_directory=True)
    return link.parent
