"""`weft launch`: check a run, start its ranks through DeepSpeed's launcher, stop them together."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.conf import load
from weft.conf.batch import fit_batch
from weft.conf.hosts import is_loopback, world_size
from weft.conf.private import SECRETS, split_secrets, write_private
from weft.conf.run_lock import RunLock
from weft.conf.schema import WeftConfig
from weft.conf.trees import to_yaml
from weft.tools.preflight import num_gpus, preflight
from weft.tools.processes import run_group

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
# What ranks on other machines need of this environment, beyond what the launcher forwards.
FORWARDED = ("DS_", "GLOO_", "HF_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "WANDB_", "WEFT_")
GRACE_S = 30.0


def main(argv: Sequence[str]) -> int:
    """Run ``[launcher options] [recipe=NAME] [key=value ...]``; returns the ranks' exit code.

    Raises:
        ValueError: bad input, found before any process starts.
    """
    options, overrides, recipe_file = _arguments(argv)
    config = load(overrides, recipe_file=recipe_file)
    config = fit_batch(config, world_size(config.cluster))
    if config.dry_run:
        from weft.tools.dry_run import report

        print(report(config))
        return 0
    config = replace(config, cluster=replace(config.cluster, master_port=config.cluster.master_port or _free_port()))
    later = any(option.startswith("--node_rank=") and option != "--node_rank=0" for option in options)
    preflight(config, leave_out={"port"} if later else ())  # the first machine opens the port
    folder = (Path(config.train.output_dir).expanduser() / config.train.name).absolute()
    RunLock.check(folder)
    file = write_config(config, folder / "config.yaml")
    env = environment(os.environ) | job_key(config, os.environ, options)
    try:
        if config.cluster.hostfile and "--no_ssh" not in options:
            env["DS_ENV_FILE"] = str(write_environment(env, folder / "deepspeed_env"))
        return run_group(command(config, file, options), env=env, grace_s=GRACE_S)
    finally:
        secrets_file(folder / "deepspeed_env").unlink(missing_ok=True)


def command(config: WeftConfig, config_file: Path, options: Sequence[str] = ()) -> list[str]:
    """The call of DeepSpeed's launcher that starts the ranks of ``config``."""
    cluster = config.cluster
    hosts = ["--hostfile", str(Path(cluster.hostfile).expanduser())] if cluster.hostfile else []
    # Without a hostfile the launcher would count accelerators, of which a CPU machine has one.
    ranks = [] if cluster.hostfile else ["--num_gpus", str(cluster.ranks)]
    meeting = ["--master_addr", cluster.master_addr, "--master_port", str(cluster.master_port)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", *hosts, *ranks, *meeting, *options]
    return [*launcher, "--module", "weft.recipes.train", "--config-file", str(config_file)]


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment: one thread each, and CPUs where there is no GPU, unless set."""
    env = dict(outer)
    env.setdefault("OMP_NUM_THREADS", "1")
    if not num_gpus():
        env.setdefault("DS_ACCELERATOR", "cpu")
    return env


def job_key(config: WeftConfig, outer: Mapping[str, str], options: Sequence[str] = ()) -> dict[str, str]:
    """The key by which ranks of different hosts and sites know each other: the one in WEFT_KEY, or a new one.

    Raises:
        ValueError: WEFT_KEY is too short, or every machine's launcher needs the same and it is not set.
    """
    if len(config.cluster.sites) < 2 and is_loopback(config.cluster.master_addr):
        return {}
    from weft.comm.wan.key import VARIABLE, WanKey

    if VARIABLE in outer or "--no_ssh" in options:
        WanKey.from_environment()
        return {}
    return {VARIABLE: secrets.token_hex(32)}


def write_config(config: WeftConfig, path: Path) -> Path:
    """The resolved configuration as a YAML file, whole or absent; `weft launch recipe=FILE` repeats the run."""
    write_private(path, to_yaml(config))  # it may hold tokens and paths
    return path


def write_environment(env: Mapping[str, str], path: Path) -> Path:
    """The variables that ssh does not carry, after those of the user's own `.deepspeed_env`.

    DeepSpeed's launchers write them into command lines, where every user of every host reads them. So
    what is secret goes by a file of its own, whose name alone is in there.
    """
    variables: dict[str, str] = {}
    for own in (Path("~/.deepspeed_env").expanduser(), Path(".deepspeed_env")):
        lines = own.read_text().splitlines() if own.is_file() else []
        variables |= {name.strip(): value for name, sign, value in (line.partition("=") for line in lines) if sign}
    variables |= {name: value for name, value in env.items() if name.startswith(FORWARDED) and "\n" not in value}
    plain, secret = split_secrets(variables)
    if secret:
        plain[SECRETS] = str(secrets_file(path))
        write_private(secrets_file(path), _lines(secret))
    write_private(path, _lines(plain))
    return path


def secrets_file(path: Path) -> Path:
    """Where the secret ones lie that `write_environment` left out of ``path``."""
    return path.with_name(f"{path.name}.secrets")


def _lines(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _arguments(argv: Sequence[str]) -> tuple[list[str], list[str], str | None]:
    """Launcher options, overrides, and a recipe's file."""
    parser = argparse.ArgumentParser(
        prog="weft launch",
        usage="weft launch [--config-file FILE] [launcher options] [recipe=NAME] [key=value ...]",
        description="Start the ranks of a run. `weft config` lists what can be set.",
        allow_abbrev=False,
    )
    parser.add_argument("--config-file", help="a recipe's YAML file, as recipe=FILE.yaml")
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
    return options, overrides, known.config_file


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
