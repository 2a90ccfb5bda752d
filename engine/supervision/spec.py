"""The inputs of a run's driver, which `weft launch` leaves in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.conf.host.private import write_private
from weft.conf.host.run_lock import RunLock
from weft.conf.schema import WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.supervision.early import PRELOAD, TARGET


@dataclass(frozen=True)
class Spec:
    """The inputs of a driver besides the configuration.

    Attributes:
        target: what each rank runs, ``module:function``.
        preload: modules that forkservers import.
        environment: variables for agents on other hosts, some of them secret.
        ssh_port: 0 means the default of ssh.
    """

    target: str
    preload: list[str]
    environment: dict[str, str]
    ssh_port: int = 0

    def write(self, run_folder: Path) -> None:
        """Write the specification into the run's folder, readable by its owner alone."""
        write_private(spec_file(run_folder), json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_folder: Path) -> Spec:
        """Return the specification that `write` stored.

        Raises:
            ValueError: the file does not exist.
        """
        try:
            return cls(**json.loads(spec_file(run_folder).read_text()))
        except OSError as error:
            raise ValueError(f"{run_folder}: no supervised run is under way there ({error.strerror})") from error


def spec_file(run_folder: Path) -> Path:
    """Return the specification's path. The file contains keys."""
    return run_folder / "supervisor" / "job.json"


def config_file(run_folder: Path) -> Path:
    """Return the configuration that the run was started with. Each attempt has its own in the same folder."""
    return run_folder / "supervisor" / "config.yaml"


def prepare_folder(
    config: WeftConfig, folder: Path, environment: Mapping[str, str], *, supervised: bool = True
) -> None:
    """Write the configuration and the specification into the run's folder.

    Args:
        environment: variables for agents.
        supervised: whether the run restarts after a fault, and continues when its launcher ends.

    Raises:
        ValueError: a restart would resume from another run's checkpoints.
    """
    checkpoints = folder / "checkpoints"
    if supervised and config.checkpoint.resume != "auto" and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise ValueError(
            f"checkpoint.resume={config.checkpoint.resume}: after a fault the run would resume from {checkpoints}, "
            "which an earlier run has left; move it away, or choose another train.name"
        )
    RunLock.check(folder / "supervisor")
    settled = replace(config.supervise, enabled=supervised, in_process=supervised and config.supervise.in_process)
    write_private(config_file(folder), to_yaml(replace(config, supervise=settled)))
    write_private(folder / "config.yaml", to_yaml(config))
    Spec(TARGET, list(PRELOAD), dict(environment)).write(folder)
