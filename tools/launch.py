"""`weft launch`: check a run and start its ranks: here, under a supervisor, or through DeepSpeed's launcher."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from weft.conf import load
from weft.conf.batch import fit_batch
from weft.conf.features import entry, is_installed, require
from weft.conf.host.private import SECRETS, split_secrets, without_credentials, write_private
from weft.conf.host.processes import COLUMNS, columns_of, end_at_once_on_termination, free_port
from weft.conf.host.run_lock import RunLock
from weft.conf.hosts import asks_for_nodes, is_loopback, run_folder, working_hosts, world_size
from weft.conf.schema import ClusterManager, WeftConfig
from weft.conf.sources import pass_credentials
from weft.conf.trees import to_yaml
from weft.tools.launch_arguments import (
    Arguments,
    EarlyProcess,
    completed,
    early_agent,
    for_other_hosts,
    num_gpus,
    own_environment,
    read_arguments,
)
from weft.tools.preflight import MACHINE, check_inputs, preflight
from weft.tools.processes import GRACE_S, run_group


def main(argv: Sequence[str]) -> int:
    """Run `weft launch`. See `run`."""
    return run(read_arguments(argv))


def run(arguments: Arguments, early: EarlyProcess | None = None) -> int:
    """Start the run of a command line; return the ranks' exit code.

    Args:
        early: the agent of this host, if it has been started already.

    Raises:
        ValueError: bad input, found before any rank starts.
    """
    if arguments.attach:
        rest = [*arguments.options, *arguments.overrides, arguments.recipe_file, arguments.write]
        if unused := next(filter(None, rest), None):
            raise ValueError(f"--attach {arguments.attach}: the run has its settings already; leave out {unused}")
        require("supervision", "weft launch --attach")
        code: int = entry("supervision").drive(Path(arguments.attach).expanduser().absolute(), attach=True)
        return code
    options, overrides, recipe_file = arguments.options, arguments.overrides, arguments.recipe_file
    config = load(overrides, recipe_file=recipe_file)
    config = fit_batch(config, world_size(config.cluster))
    pass_credentials(config.data, os.environ)
    supervised = is_supervised(config, options)
    if not supervised:
        check_remote_paths(config, options)
    if config.dry_run:
        os.environ.update(completed(os.environ, num_gpus() or len(config.cluster.hostfile)))  # other hosts have GPUs
        from weft.tools.dry_run import show

        show(config)
        return 0
    folder = run_folder(config)
    if arguments.write and not asks_for_nodes(config.cluster):
        raise ValueError(
            f"--write {arguments.write}: cluster.manager={config.cluster.manager.name}, so that nothing is asked for"
        )
    if asks_for_nodes(config.cluster):
        words = [*(["--config-file", str(Path(recipe_file).absolute())] if recipe_file else []), *overrides]
        words = without_credentials(words)
        given = entry("supervision").request_hosts(config, words, folder, arguments.write, os.environ)
        if given is None:
            return 0
        config = given
    config = replace(config, cluster=replace(config.cluster, master_port=config.cluster.master_port or free_port()))
    if starts_here(config, options, supervised=supervised):
        return run_here(config, folder, early or early_agent(), supervised=supervised)
    later = any(option.startswith("--node_rank=") and option != "--node_rank=0" for option in options)
    preflight(config, leave_out={"port"} if later else ())  # the first machine opens the port
    RunLock.check(folder)
    env = environment(os.environ) | job_key(config, os.environ, options)
    if supervised:
        return supervise(config, folder, env)
    file = write_config(config, folder / "config.yaml")
    try:
        if config.cluster.hostfile and "--no_ssh" not in options:
            env["DS_ENV_FILE"] = str(write_environment(env, folder / "deepspeed_env"))
        saving_s = config.checkpoint.signal_deadline_s if config.checkpoint.on_signal else 0.0
        return run_group(command(config, file, options), env=env, grace_s=GRACE_S + saving_s)
    finally:
        secrets_file(folder / "deepspeed_env").unlink(missing_ok=True)


def is_supervised(config: WeftConfig, options: Sequence[str]) -> bool:
    """Return True if a supervisor starts the ranks.

    It does if supervision is enabled, or on several hosts if there are no options for DeepSpeed's launcher.

    Raises:
        ValueError: supervision is enabled, but there are options for DeepSpeed's launcher; or the cluster's settings
            need a supervisor.
    """
    cluster, enabled = config.cluster, config.supervise.enabled
    if enabled and options:
        raise ValueError(f"supervise.enabled=true: {options[0]} is an option of DeepSpeed's launcher; leave it out")
    needed = ""
    if cluster.manager in (ClusterManager.slurm, ClusterManager.kubernetes):
        needed = f"cluster.manager={cluster.manager.name}"
    elif cluster.spares:
        needed = f"cluster.spares={cluster.spares}"
    if needed and (options or enabled is False):
        other = options[0] if options else "supervise.enabled=false"
        raise ValueError(f"{needed}: it takes a supervisor, and {other} goes without; leave out one of them")
    if enabled is not None:
        return enabled
    hosts = working_hosts(cluster) if cluster.hostfile else {}
    return bool(needed) or (len(hosts) > 1 and not options and is_installed("supervision"))


def check_remote_paths(config: WeftConfig, options: Sequence[str]) -> None:
    """Check that the paths that DeepSpeed's launcher for pdsh writes into a shell's line need no quotes.

    Raises:
        ValueError: one does.
    """
    words = [word.partition("=")[::2] for word in options]
    launcher = dict(words).get("--launcher") or "pdsh"
    is_remote = config.cluster.hostfile and "--no_ssh" not in options and launcher == "pdsh"
    if not is_remote or (len(working_hosts(config.cluster)) < 2 and "--force_multi" not in options):
        return
    for name, path in (("current folder", os.getcwd()), ("Python", sys.executable)):
        if shlex.quote(path) != path:
            raise ValueError(
                f"{name}={path}: DeepSpeed's launcher passes it to shells of other hosts without quotes; use a path "
                "of letters and digits, or leave out options of DeepSpeed's launcher and set supervise.enabled=true"
            )


def starts_here(config: WeftConfig, options: Sequence[str], *, supervised: bool) -> bool:
    """Return True if an agent of this host starts all ranks; otherwise DeepSpeed's launcher does."""
    cluster = config.cluster
    if options or not is_installed("supervision") or cluster.manager not in (ClusterManager.local, ClusterManager.ssh):
        return False
    return not cluster.hostfile or (not supervised and len(working_hosts(cluster)) == 1)


def run_here(config: WeftConfig, folder: Path, early: EarlyProcess, *, supervised: bool) -> int:
    """Run all ranks on this host, forked from a process with their imports; return the exit code.

    The same process checks the inputs, so that nothing is imported twice.

    Args:
        supervised: True if the run restarts after a fault, and continues when this process ends.
    """
    preflight(config, checks=MACHINE)
    RunLock.check(folder)
    os.environ.update(environment(os.environ) | job_key(config, os.environ))
    if columns := columns_of(sys.stderr):
        os.environ[COLUMNS] = str(columns)
    file = folder / ".checked.yaml"
    try:
        write_config(config, file)
        code = early.run(f"{check_inputs.__module__}:{check_inputs.__name__}", [str(file)])
    finally:
        file.unlink(missing_ok=True)
    if code:
        return code
    print(f"weft launch: starting {world_size(config.cluster)} ranks on this host", file=sys.stderr, flush=True)
    end_at_once_on_termination()  # the driver handles signals
    supervision = entry("supervision")
    supervision.prepare(config, folder, own_environment() | for_other_hosts(os.environ), supervised=supervised)
    code = supervision.drive(folder, early=early)
    return code


def supervise(config: WeftConfig, folder: Path, env: Mapping[str, str]) -> NoReturn:
    """Replace this process by the driver of a run on several hosts, which frees the imports of the checks.

    Raises:
        ValueError: a restart would resume from another run's checkpoints.
    """
    supervision = entry("supervision")
    supervision.prepare(config, folder, own_environment() | for_other_hosts(env))
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *supervision.DRIVER, str(folder)], dict(env))


def command(config: WeftConfig, config_file: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the command of DeepSpeed's launcher that starts the ranks of ``config``."""
    cluster = config.cluster
    hosts = ["--hostfile", str(Path(cluster.hostfile).expanduser())] if cluster.hostfile else []
    # Without a hostfile the launcher would count accelerators, of which a CPU machine has one.
    ranks = [] if cluster.hostfile else ["--num_gpus", str(cluster.ranks)]
    meeting = ["--master_addr", cluster.master_addr, "--master_port", str(cluster.master_port)]
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", *hosts, *ranks, *meeting, *options]
    return [*launcher, "--module", "weft.recipes.train", "--config-file", str(config_file)]


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks. See `completed`."""
    return completed(outer, num_gpus())


def job_key(config: WeftConfig, outer: Mapping[str, str], options: Sequence[str] = ()) -> dict[str, str]:
    """Return the key by which ranks of different hosts and sites authenticate each other, as an environment variable.

    It is WEFT_KEY if this is set, otherwise a new key.

    Raises:
        ValueError: WEFT_KEY is too short; or it is not set, and the launchers of several machines need the same key.
    """
    if len(config.cluster.sites) < 2 and is_loopback(config.cluster.master_addr):
        return {}
    from weft.comm.key import VARIABLE, WanKey

    if VARIABLE in outer or "--no_ssh" in options:
        WanKey.from_environment()
        return {}
    return {VARIABLE: secrets.token_hex(32)}


def write_config(config: WeftConfig, path: Path) -> Path:
    """Write the resolved configuration as a YAML file, atomically; `weft launch recipe=FILE` repeats the run."""
    write_private(path, to_yaml(config))  # it may hold tokens and paths
    return path


def write_environment(env: Mapping[str, str], path: Path) -> Path:
    """Write the variables that ssh does not carry, after those of the user's own `.deepspeed_env`.

    DeepSpeed's launchers write them into command lines, which every user of every host can read. So
    secrets are in a separate file, whose name is passed in a variable.
    """
    variables = own_environment()
    variables |= {name: value for name, value in for_other_hosts(env).items() if "\n" not in value}
    plain, secret = split_secrets(variables)
    if secret:
        plain[SECRETS] = str(secrets_file(path))
        write_private(secrets_file(path), _lines(secret))
    write_private(path, _lines(plain))
    return path


def secrets_file(path: Path) -> Path:
    """Return the file of the secret variables that `write_environment` left out of ``path``."""
    return path.with_name(f"{path.name}.secrets")


def _lines(variables: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in variables.items())
