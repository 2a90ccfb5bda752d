"""The hosts of a run of `benchmarks survive`, emulated on this machine as processes or as nodes of a netbed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

from weft.engine.supervision.progress_page import page_path
from weft.tools.netbed.bed import NetBed
from weft.tools.netbed.topology import Link, Node, Topology

HOSTS = ("east0", "east1", "west0", "west1")
SITES = ("east", "west")
RANKS_PER_HOST = 2
NUM_RANKS = RANKS_PER_HOST * len(HOSTS)
UPLINK_MBPS, LATENCY_MS = 20.0, 10.0
"""Limits of a node: low enough that a tiny model notices a tenth."""
NODES = "WEFT_SURVIVE_NODES"
"""Environment variable with the folder of host namespaces and power states for the stand-in of ssh."""
_PORT = 29500

_SSH = f"""\
#!/bin/sh
# In the place of ssh: enters a host's network namespace. A machine that is off does not tell that it is.
while [ $# -gt 2 ]; do shift; done
node="${NODES}/$1"
if [ -e "$node.off" ]; then
    sleep 20; echo "ssh: connect to host $1 port 22: Connection timed out" >&2; exit 255
fi
exec 3<&0
nsenter --net="$node" -- sh -c "$2" <&3 3<&- &
trap 'kill $!' TERM INT
wait $!
code=$?
while [ -e "$node.off" ]; do sleep 0.2; done
exit $code
"""
"""`ssh OPTIONS HOST COMMAND`, as `SshStarter` calls it."""


class OneMachine:
    """This machine as the only host; the run is supervised, so that all ranks are forked from one process.

    Attributes:
        settings: settings of the run that select these hosts.
    """

    def __init__(self, *, stages: int) -> None:
        sites = ", ".join(f"{{name: {site}, ranks: {stages // len(SITES)}}}" for site in SITES)
        self.settings = [f"cluster.ranks={NUM_RANKS}", f"cluster.sites=[{sites}]", "supervise.enabled=true"]

    def popen(self, command: Sequence[str], environment: dict[str, str], **keywords: Any) -> subprocess.Popen:
        """Start the driver on this machine."""
        return subprocess.Popen(command, env=environment, **keywords)

    def close(self) -> None:
        """Do nothing, because there are no resources."""


class LocalHosts(OneMachine):
    """Hosts that share this machine's network."""

    def __init__(self, folder: Path) -> None:
        self.settings = [*_cluster(folder), "cluster.manager=local"]


class BedHosts(OneMachine):
    """Hosts that are nodes of a netbed, with a WAN between sites, reached by a replacement of ssh.

    Attributes:
        bed: the netbed, on whose lines faults can be caused.
    """

    def __init__(self, folder: Path) -> None:
        """Build the bed, and write the hostfile, host names and the replacement of ssh to ``folder``.

        Raises:
            ValueError: this machine cannot build a bed.
        """
        self._folder, self._off = folder, set[str]()
        topology = Topology(
            name=f"survive{os.getpid()}",
            nodes=tuple(Node(name=host, site=host[:-1], uplink_mbps=UPLINK_MBPS) for host in HOSTS),
            links=tuple(Link(sites=pair, latency_ms=LATENCY_MS) for pair in combinations(SITES, 2)),
        )
        self.bed = NetBed.up(topology)
        master = f"cluster.master_addr={self.bed.address(HOSTS[0])}"
        self.settings = [*_cluster(folder), "cluster.manager=ssh", master, f"cluster.master_port={_PORT}"]
        for host in HOSTS:
            (self._nodes / host).symlink_to(self.bed.namespace(host))
        names = [f"{self.bed.address(host)} {host}\n" for host in HOSTS]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(_SSH)
        ssh.chmod(0o755)

    @property
    def _nodes(self) -> Path:
        path = self._folder / "nodes"
        path.mkdir(exist_ok=True)
        return path

    def popen(self, command: Sequence[str], environment: dict[str, str], **keywords: Any) -> subprocess.Popen:
        """Start the driver on the first host, with the names of all hosts in /etc/hosts."""
        environment = environment | {
            "PATH": f"{self._folder / 'bin'}:{environment['PATH']}",
            NODES: str(self._nodes),
            "GLOO_SOCKET_IFNAME": "lan0",
        }
        mount = 'mount --bind "$0" /etc/hosts; exec "$@"'
        known = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount]
        return self.bed.popen(HOSTS[0], [*known, str(self._folder / "hosts"), *command], env=environment, **keywords)

    def switch_off(self, *hosts: str, run_folder: Path) -> None:
        """Disconnect hosts, kill their processes, and delete the checkpoints in their memory, until `switch_on`."""
        for host in hosts:
            (self._nodes / f"{host}.off").touch()
            self.bed.cut(host)
            self._lan(host, "down")
        for host in hosts:
            for process in self._processes(host):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            page = page_path(run_folder, host)
            for left in page.parent.glob(f"{page.name}.memory*"):
                shutil.rmtree(left, ignore_errors=True)
        self._off |= set(hosts)

    def switch_on(self) -> None:
        """Restore every line and every host; processes are not restarted."""
        self.bed.heal()
        for host in self._off:
            self._lan(host, "up")
            (self._nodes / f"{host}.off").unlink()
        self._off.clear()

    def _lan(self, host: str, state: str) -> None:
        self.bed.run(host, ["ip", "link", "set", "lan0", state], check=True)

    def _processes(self, host: str) -> list[psutil.Process]:
        here = os.stat(self.bed.namespace(host)).st_ino
        found = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.NoSuchProcess):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == here:
                    found.append(process)
        return found

    def close(self) -> None:
        """Take down the bed, which ends all processes in it."""
        self.bed.down()


def _cluster(folder: Path) -> list[str]:
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{host} slots={RANKS_PER_HOST}\n" for host in HOSTS))
    sites = ", ".join(f"{{name: {site}, hosts: [{', '.join(h for h in HOSTS if h[:-1] == site)}]}}" for site in SITES)
    return [f"cluster.hostfile={hostfile}", "supervise.enabled=true", f"cluster.sites=[{sites}]"]
