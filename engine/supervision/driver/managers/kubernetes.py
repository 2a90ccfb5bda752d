"""Kubernetes: a run as a JobSet, one replicated job for each site and one for the driver.

This module is also the program of each pod. Kubernetes, not the driver, starts the pods. The driver writes the agent's
command into the folder that all pods share. The program starts that agent, and another one for each newer command.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from weft.conf.checks import check
from weft.conf.host.private import write_private
from weft.conf.host.storage import Storage
from weft.conf.hosts import world_size
from weft.conf.schema import KubernetesConfig, SiteConfig, TrainConfig, WeftConfig
from weft.conf.trees import to_yaml
from weft.engine.supervision.agent import agent
from weft.engine.supervision.driver.hosts import hostfile_text, on_hosts
from weft.engine.supervision.messages import AgentCommand, decode, encode

DRIVER = "driver"
SETTINGS = "/etc/weft"
"""Folder of the configuration in every pod."""
_NEVER = 2**31 - 1  # failed pods never fail a site's job, because the driver decides
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_PACKAGES = "python -m weft.tools.cli"


def job_set(config: WeftConfig) -> str:
    """Return the YAML of a run: its configuration as a ConfigMap, and the JobSet.

    Hosts are pods, under the names that JobSet's headless service gives them. The last ``spares`` pods of each site
    wait. The Secret with the key and the volume claim must exist.

    Raises:
        ValueError: a setting that a JobSet needs is missing, or a name is not valid in Kubernetes.
    """
    _check(config)
    name = config.train.name
    resolved = _resolved(config)
    labels = {"app.kubernetes.io/name": "weft", "app.kubernetes.io/instance": name}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-settings", "namespace": config.cluster.kubernetes.namespace, "labels": labels},
        "data": {"config.yaml": to_yaml(resolved), "hostfile": hostfile_text(_slots(config))},
    }
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": config.cluster.kubernetes.namespace, "labels": labels},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [DRIVER]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                *(_site_job(resolved, site, labels) for site in config.cluster.sites),
                _driver_job(resolved, config.cluster.sites[0].name, labels),
            ],
        },
    }
    return yaml.safe_dump_all([settings, made], sort_keys=False, width=120)


def host_names(name: str, site: SiteConfig) -> list[str]:
    """Return the DNS names of a site's pods, spares last."""
    return [f"{name}-{site.name}-0-{index}.{name}" for index in range(site.nodes + site.spares)]


def _slots(config: WeftConfig) -> dict[str, int]:
    return {host: config.cluster.ranks for site in config.cluster.sites for host in host_names(config.train.name, site)}


def _resolved(config: WeftConfig) -> WeftConfig:
    """Return the configuration as the pods see it, with the names of all hosts."""
    sites = [replace(site, select={}) for site in config.cluster.sites]
    names = {site.name: host_names(config.train.name, site) for site in sites}
    config = replace(config, cluster=replace(config.cluster, sites=sites))
    return on_hosts(config, names, names[sites[0].name][0], f"{SETTINGS}/hostfile")


def _check(config: WeftConfig) -> None:
    check(config)
    wanted = config.cluster.kubernetes
    for field in ("image", "claim"):
        if not getattr(wanted, field):
            raise ValueError(f"cluster.kubernetes.{field}='': a JobSet needs it; set it")
    if not Path(config.train.output_dir).is_absolute():
        raise ValueError(
            f"train.output_dir={config.train.output_dir}: the claim is mounted there in every pod; make it absolute"
        )
    names = {"train.name": config.train.name} | {
        f"cluster.sites.name ({site.name})": site.name for site in config.cluster.sites
    }
    for field, name in names.items():
        if not _NAME.fullmatch(name) or name == DRIVER:
            raise ValueError(f"{field}={name}: Kubernetes takes small letters, digits and hyphens, and not {DRIVER!r}")
    longest = max(len(host.split(".")[0]) for host in _slots(config))
    if longest > 63:
        raise ValueError(
            f"train.name={config.train.name}: pods' names get {longest} characters, at most 63; shorten it"
        )
    if world_size(config.cluster) % config.pipeline.stages:
        raise ValueError(
            f"pipeline.stages={config.pipeline.stages}: {world_size(config.cluster)} processes are not a multiple of it"
        )


def _site_job(config: WeftConfig, asked: SiteConfig, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the job of a site, with one pod per host. A pod that ends is always started again."""
    count = asked.nodes + asked.spares
    command = [f"exec python -m {__name__} {_run_folder(config.train)} $(hostname).{config.train.name}"]
    fresh = f"test $(($(date +%s) - $(stat -c %Y {ALIVE}))) -lt 60"
    probe = {"exec": {"command": ["sh", "-c", fresh]}, "periodSeconds": 20, "timeoutSeconds": 10}
    container = _container(
        config.cluster.kubernetes, config.train.output_dir, command, config.cluster.master_port, config.cluster.ranks
    ) | {
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**probe, "failureThreshold": 3},
        "readinessProbe": {**probe, "failureThreshold": 1},
    }
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(labels)},
    }
    spec = _pod(config.train.name, config.cluster.kubernetes.claim, container) | {
        "restartPolicy": "OnFailure",
        "topologySpreadConstraints": [spread],
    }
    if asked.select:
        spec["nodeSelector"] = dict(asked.select)
    job = {"completionMode": "Indexed", "parallelism": count, "completions": count, "backoffLimit": _NEVER}
    return {"name": asked.name, "replicas": 1, "template": {"spec": {**job, "template": _template(spec, labels)}}}


def _driver_job(config: WeftConfig, first: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the job of the driver's pod, without a GPU. A killed pod is replaced, and attaches to the run."""
    folder = _run_folder(config.train)
    command = [
        f"if [ -e {folder}/supervisor/job.json ]; then exec {_PACKAGES} launch --attach {folder}; fi; "
        f"exec {_PACKAGES} launch --config-file {SETTINGS}/config.yaml"
    ]
    port = config.supervise.port or config.cluster.master_port
    container = _container(config.cluster.kubernetes, config.train.output_dir, command, port, 0) | {
        "startupProbe": {"tcpSocket": {"port": port}, "periodSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 20, "failureThreshold": 3},
    }
    # A run that ended with an error is not retried, but a lost driver is.
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1, 2]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        "completionMode": "Indexed",
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": 100,
        "podFailurePolicy": {"rules": rules},
    }
    spec = _pod(config.train.name, config.cluster.kubernetes.claim, container) | {"restartPolicy": "Never"}
    return {
        "name": DRIVER,
        "replicas": 1,
        "dependsOn": [{"name": first, "status": "Ready"}],
        "template": {"spec": {**job, "template": _template(spec, labels)}},
    }


def _container(
    wanted: KubernetesConfig, output_dir: str, command: Sequence[str], port: int, gpus: int
) -> dict[str, Any]:
    key = {"name": wanted.key_secret, "key": "WEFT_KEY"}
    container: dict[str, Any] = {
        "name": "weft",
        "image": wanted.image,
        "command": ["sh", "-c", *command],
        "env": [{"name": "WEFT_KEY", "valueFrom": {"secretKeyRef": key}}],
        "ports": [{"containerPort": port, "protocol": "TCP"}],
        "volumeMounts": [
            {"name": "runs", "mountPath": output_dir},
            {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if gpus and wanted.gpu_resource:
        container["resources"] = {"limits": {wanted.gpu_resource: gpus}}
    return container


def _pod(name: str, claim: str, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "containers": [dict(container)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "settings", "configMap": {"name": f"{name}-settings"}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
        "terminationGracePeriodSeconds": 30,
    }


def _template(spec: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    return {"metadata": {"labels": dict(labels)}, "spec": dict(spec)}


def _run_folder(train: TrainConfig) -> str:
    return f"{train.output_dir}/{train.name}"


ALIVE = Path("/tmp/weft-pod-alive")
"""File that is touched regularly, for liveness probes."""
_LOOK_S = 0.5
_END_S = 10.0


@dataclass
class PodProcess:
    """The driver's handle of an agent in a pod: a command file, which the driver can remove."""

    command: Path
    killed: bool = False

    def poll(self) -> int | None:
        """Return 0 after `kill`, or None. Only missing reports show that an agent has ended."""
        return 0 if self.killed else None

    def kill(self) -> None:
        """Remove the command file, whereupon the pod ends the agent."""
        self.command.unlink(missing_ok=True)
        self.killed = True


class PodStarter:
    """Starts agents on hosts that are pods and wait for commands."""

    def __init__(self) -> None:
        self._storage = Storage(Path("supervisor", "orders"))

    def start(self, command: AgentCommand) -> PodProcess:
        """Write a pod's command, which replaces the previous one.

        Raises:
            OSError: the file cannot be written, or storage hangs.
        """
        file = command_file(Path(command.run_folder), command.host)
        self._storage.call(write_private, file, encode(command).decode())
        return PodProcess(file)


def command_file(run_folder: Path, host: str) -> Path:
    """Return the path of a pod's command file, which contains keys."""
    return run_folder / "supervisor" / "orders" / f"{host}.json"


def main(argv: list[str]) -> int:
    """Run ``RUN_FOLDER HOST``: start agents according to their command files, until this process is killed."""
    folder, host = argv
    file = command_file(Path(folder), host)
    running: subprocess.Popen[bytes] | None = None
    command: AgentCommand | None = None
    while True:
        ALIVE.touch()
        wanted = _read(file)
        if (wanted and wanted.generation) != (command and command.generation):
            if running is not None:
                _end(running)
            running, command = (_start(wanted) if wanted else None), wanted
        time.sleep(_LOOK_S)


def _read(file: Path) -> AgentCommand | None:
    try:
        return decode(file.read_text(), AgentCommand)
    except (OSError, ValueError):  # not written yet, or the shared folder is unavailable
        return None


def _start(command: AgentCommand) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", agent.__name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin as inlet:
        inlet.write(encode(command) + b"\n")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
