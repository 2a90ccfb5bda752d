"""The part of `weft launch` that runs before its imports: arguments, and the environment of its processes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from weft.conf.features import entry


def num_gpus() -> int:
    """Return the number of GPUs that this process may use."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [device.strip() for device in visible.split(",")]
        return list(takewhile(lambda device: device not in ("", "-1"), named))  # CUDA ignores what follows those, too
    return [str(number) for number in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]


# Options of DeepSpeed's launcher that pass through; the rest follows from the configuration.
FLAGS = ("--no_ssh", "--no_ssh_check", "--force_multi", "--bind_cores_to_rank")
VALUES = (
    "--node_rank",
    "--launcher",
    "--launcher_args",
    "--include",
    "--exclude",
    "--ssh_port",
    "--venv_script",
    "--bind_core_list",
    "--enable_each_rank_log",
)
ANNOUNCEMENT = "weft launch: loading torch, DeepSpeed and transformers, and checking the settings"
ELSEWHERE = ("dry_run=", "cluster.hostfile=", "cluster.manager=", "cluster=")
"""Settings with which no rank, or not every rank, may start on this host."""

FORWARDED = (
    *("DS_", "FI_", "GLOO_", "HF_", "NCCL_", "OMP_", "PYTORCH_", "TOKENIZERS_", "TORCH_", "TORCHINDUCTOR_"),
    *("TRANSFORMERS_", "TRITON_", "UCX_", "WANDB_", "WEFT_"),
)
"""Prefixes of environment variables that ranks on other hosts need, besides those of a user's environment file."""
_WHOLE = frozenset({"LD_LIBRARY_PATH", "PYTHONPATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"})
_PROXIES = frozenset({"http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"})
"""Names of such variables. Proxies count in capitals, too."""


@dataclass(frozen=True)
class Arguments:
    """The command line of `weft launch`.

    Attributes:
        options: options of DeepSpeed's launcher.
        overrides: settings of the run.
        recipe_file: a recipe's YAML file.
        attach: folder of a supervised run whose driver has ended, to which this process attaches as the new driver.
        write: file for the request to a cluster manager.
    """

    options: list[str]
    overrides: list[str]
    recipe_file: str | None
    attach: str | None
    write: str | None

    @property
    def may_run_here(self) -> bool:
        """True unless an argument excludes that all ranks start on this host."""
        elsewhere = any(name in word for word in self.overrides for name in ELSEWHERE)
        return not (self.options or self.attach or self.write or elsewhere)


class EarlyProcess(Protocol):
    """A process of this host that is already importing what ranks need."""

    def run(self, target: str, arguments: Sequence[str]) -> int:
        """Run a function in a fork of the process, with this process's output, and return its exit code."""
        ...

    def close(self) -> None:
        """End the process, unless the run has begun."""
        ...


def early_agent() -> EarlyProcess:
    """Start the agent of this host, and print a message because its imports take time."""
    print(ANNOUNCEMENT, file=sys.stderr, flush=True)
    agent: EarlyProcess = entry("supervision").early_agent(completed({**os.environ, **own_environment()}, num_gpus()))
    return agent


def completed(outer: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the ranks' environment: one thread per rank, and CPUs if there is no GPU; variables that are set stay."""
    env = dict(outer)
    env.setdefault("OMP_NUM_THREADS", "1")
    if not gpus:
        env.setdefault("DS_ACCELERATOR", "cpu")
    return env


def own_environment() -> dict[str, str]:
    """Return the variables of the user's own `.deepspeed_env` files, in the home folder and in the current one."""
    variables: dict[str, str] = {}
    for own in (Path("~/.deepspeed_env").expanduser(), Path(".deepspeed_env")):
        lines = own.read_text().splitlines() if own.is_file() else []
        variables |= {name.strip(): value for name, sign, value in (line.partition("=") for line in lines) if sign}
    return variables


def for_other_hosts(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that ranks on other hosts need."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) or name in _WHOLE or name.lower() in _PROXIES
    }


def read_arguments(argv: Sequence[str]) -> Arguments:
    """Parse a command line."""
    parser = argparse.ArgumentParser(
        prog="weft launch",
        usage="weft launch [--config-file FILE] [launcher options] [recipe=NAME] [key=value ...]",
        description="Start the ranks of a run. `weft config` lists what can be set.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-file", help="a recipe's YAML file, as recipe=FILE.yaml")
    parser.add_argument("--attach", metavar="RUN_FOLDER", help="drive a supervised run whose driver has ended")
    parser.add_argument("--write", metavar="FILE", help="write what a cluster manager would be asked, ask nothing")
    group = parser.add_argument_group("passed to DeepSpeed's launcher")
    for name in FLAGS:
        group.add_argument(name, action="store_true")
    for name in VALUES:
        group.add_argument(name)
    known, overrides = parser.parse_known_args(argv)
    given = vars(known)
    options = [name for name in FLAGS if given[name[2:]]]
    for name in VALUES:
        if given[name[2:]] is not None:
            options.append(f"{name}={given[name[2:]]}")
    return Arguments(options, overrides, known.config_file, known.attach, known.write)
