"""Requests of `weft launch` to a cluster manager: request hosts, or read the hosts of the allocation."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.conf.host.files import write_atomic
from weft.conf.host.private import make_run_folder
from weft.conf.schema import ClusterManager, WeftConfig
from weft.engine.supervision.managers import kubernetes, slurm


def hosts_or_request(
    config: WeftConfig, words: Sequence[str], folder: Path, write: str | None, environment: Mapping[str, str]
) -> WeftConfig | None:
    """Return the configuration on the hosts of the allocation, or None if hosts were requested instead.

    Args:
        config: a run whose hosts a manager chooses.
        words: arguments of `weft launch`, without ``--write``.
        folder: the run's folder.
        write: file for the request, which is then not submitted. None submits the request.

    Raises:
        ValueError: the request cannot be made, or the manager refuses it.
    """
    match config.cluster.manager:
        case ClusterManager.slurm:
            if slurm.in_allocation(environment) and not write:
                return slurm.with_allocation(config, environment, folder / "hostfile")
            file = _write(slurm.script(config, words, sys.executable), write, folder / "job.sbatch")
            if not write:
                print(f"job {slurm.submit(file, folder)}: {file}; its output is in {folder}")
        case _:
            if not write:
                raise ValueError(
                    "cluster.manager=kubernetes: give --write job.yaml, and then `kubectl apply -f job.yaml`"
                )
            _write(kubernetes.job_set(config), write, folder)
    return None


def _write(text: str, named: str | None, usual: Path) -> Path:
    file = Path(named).expanduser() if named else usual
    if not named:
        make_run_folder(file.parent)
    write_atomic(file, text)
    if named:
        print(f"{os.fspath(file)} is written")
    return file
