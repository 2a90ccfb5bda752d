"""A running bed: its nodes, processes in them, faults on its lines, and how it is taken down."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

from weft.comm.native import Kind, build
from weft.tools.netbed.topology import Topology

_ROUTER = Path(__file__).with_name("router.c")
_CONTROL = "\0weft-netbed-"
_FOREVER_S = 1e9
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


def missing() -> str:
    """Return a description of the requirements that this machine lacks, or an empty text if it has all of them."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun (modprobe tun; in a container --device /dev/net/tun --cap-add NET_ADMIN)"
    absent = [tool for tool in ("ip", "nsenter", "cc") if shutil.which(tool) is None]
    return f"{', '.join(absent)} not found (packages iproute2, util-linux, gcc)" if absent else ""


@dataclass(frozen=True)
class NodeStatus:
    """The router's counters of a node."""

    name: str
    address: str
    uplink_mbps: float
    sent_bytes: int
    sent_packets: int
    queue_drops: int
    fault_drops: int


@dataclass(frozen=True)
class Status:
    """A bed's state.

    Attributes:
        lag_ms: the longest delay of a packet behind its delivery time since the last status.
        in_flight: packets on the lines.
        faults: descriptions of the active faults.
    """

    pid: int
    in_flight: int
    lag_ms: float
    nodes: tuple[NodeStatus, ...]
    faults: tuple[str, ...]


class NetBed:
    """A bed by its name. `up` builds it; leaving it as a context manager takes it down.

        with NetBed.up(topology) as bed:
            bed.run("e0", ["ping", "-c1", bed.address("w0")])

    Everything depends on one process, the router (`router.c`). Namespaces and devices exist only as its
    descriptors, so a crash leaves nothing behind. It ends with the process that built
    the bed, unless that process calls `detach`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._router: subprocess.Popen[str] | None = None

    @classmethod
    def up(cls, topology: Topology) -> NetBed:
        """Build the bed. Raise ValueError if this machine lacks a requirement, or a bed with this name is running."""
        if lack := missing():
            raise ValueError(f"weft netbed: {lack}")
        bed = cls(topology.name)
        bed._router = subprocess.Popen(
            [build([_ROUTER], kind=Kind.program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            bed._start(topology)
        except BaseException:
            bed._end_router()
            raise
        return bed

    def __enter__(self) -> NetBed:
        return self

    def __reduce__(self) -> tuple[type[NetBed], tuple[str]]:
        return NetBed, (self.name,)  # another process has a handle on it, and does not end it

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def address(self, node: str) -> str:
        """Return the IPv4 address of ``node``."""
        return self._addresses[self._known(node)]

    @property
    def nodes(self) -> list[str]:
        """Names of all nodes."""
        return list(self._addresses)

    def popen(self, node: str, command: Sequence[str | Path], **keywords: Any) -> subprocess.Popen:
        """Start ``command`` in ``node``; the keywords are those of `subprocess.Popen`."""
        return subprocess.Popen(self._enter(node, command), **keywords)

    def run(self, node: str, command: Sequence[str | Path], **keywords: Any) -> subprocess.CompletedProcess:
        """Run ``command`` in ``node`` until it ends; the keywords are those of `subprocess.run`."""
        return subprocess.run(self._enter(node, command), **keywords)

    def namespace(self, node: str) -> str:
        """Return the path of the network namespace of ``node``, which is valid while the bed is up."""
        return self._netns("node", self._known(node))

    def enter(self, node: str) -> None:
        """Move this thread, and processes that it starts later, into ``node``. Forked children call it."""
        netns = os.open(self.namespace(node), os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(netns, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter node {node}")
        finally:
            os.close(netns)

    def cut(self, a: str, b: str = "", *, for_s: float = _FOREVER_S) -> None:
        """Drop every packet between ``a`` and ``b`` (nodes or sites); without ``b``, between ``a`` and all others."""
        self._fault("cut", a, b, 0, for_s)

    def flap(self, a: str, b: str = "", *, every_s: float, for_s: float = _FOREVER_S) -> None:
        """Alternate between a cut and a healthy line, each for ``every_s``."""
        self._fault("flap", a, b, every_s, for_s)

    def slow(self, a: str, b: str = "", *, by: float, for_s: float = _FOREVER_S) -> None:
        """Divide the rate between ``a`` and ``b`` by ``by``."""
        self._fault("slow", a, b, by, for_s)

    def drop(self, a: str, b: str = "", *, share: float, for_s: float = _FOREVER_S) -> None:
        """Drop this share of packets at random."""
        self._fault("drop", a, b, share, for_s)

    def flip(self, a: str, b: str = "", *, packets: int = 1, for_s: float = _FOREVER_S) -> None:
        """Flip a byte of the TCP payload of the next packets in each direction, and correct the checksum."""
        self._fault("flip", a, b, packets, for_s)

    def heal(self) -> None:
        """End all faults."""
        self._ask("heal")

    def status(self) -> Status:
        """Return the counters of the lines, and the active faults."""
        lines = [line.split() for line in self._ask("status").splitlines()]
        _, _, pid, in_flight, lag_ns = lines[0]
        names = [line[1] for line in lines if line[0] == "node"]
        nodes = tuple(
            NodeStatus(line[1], _address(line), float(line[5]) / 1e6, *map(int, line[6:]))
            for line in lines
            if line[0] == "node"
        )
        faults = tuple(_fault_words(line, names) for line in lines if line[0] == "fault")
        return Status(int(pid), int(in_flight), int(lag_ns) / 1e6, nodes, faults)

    def detach(self) -> None:
        """Let the bed outlive this process; `down` takes it down."""
        self._ask("detach")
        self._router = None

    def down(self) -> None:
        """End every process in the bed, and take it down."""
        with contextlib.suppress(ValueError):
            self._ask("stop")
        self._end_router()
        limit = monotonic() + 5.0
        while self.name in beds() and monotonic() < limit:  # a detached line is no child of ours
            sleep(0.01)

    # ---- below: how

    @cached_property
    def _layout(self) -> list[list[str]]:
        """The lines of a status that never change in shape: bed, sites, nodes."""
        return [line.split() for line in self._ask("status").splitlines()]

    @cached_property
    def _addresses(self) -> dict[str, str]:
        return {line[1]: _address(line) for line in self._layout if line[0] == "node"}

    def _known(self, node: str) -> str:
        if node not in self._addresses:
            raise ValueError(f"there is no node {node} in bed {self.name}; it has {', '.join(self._addresses)}")
        return node

    def _netns(self, kind: str, name: str) -> str:
        """Path of the namespace of a ``node``, or of a ``site`` (which holds its bridge)."""
        column = {"node": 4, "site": 2}[kind]
        (fd,) = (line[column] for line in self._layout if line[:2] == [kind, name])
        return f"/proc/{self._layout[0][2]}/fd/{fd}"

    def _enter(self, node: str, command: Sequence[str | Path]) -> list[str | Path]:
        return ["nsenter", f"--net={self.namespace(node)}", "--", *command]

    def _start(self, topology: Topology) -> None:
        assert self._router is not None and self._router.stdin is not None and self._router.stdout is not None
        self._router.stdin.write(router_input(topology))
        self._router.stdin.flush()  # and it stays open: its end notifies the router that this process is gone
        if self._router.stdout.readline() != "ready\n":
            assert self._router.stderr is not None
            raise ValueError(f"weft netbed: {self._router.stderr.read().strip()}")
        for site in topology.sites:
            self._configure(self._netns("site", site), site_commands(topology, site, partial(self._netns, "node")))
        for node in topology.nodes:
            netns = self._netns("node", node.name)
            self._configure(netns, node_commands(topology, node.name))
            self._write_settings(netns, kernel_settings(topology))

    def _configure(self, netns: str, commands: list[str]) -> None:
        done = subprocess.run(
            ["nsenter", f"--net={netns}", "--", "ip", "-batch", "-"],
            input="\n".join(commands),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ValueError(f"weft netbed: ip refused:\n{done.stderr.strip()}")

    def _write_settings(self, netns: str, settings: dict[str, str]) -> None:
        # /proc/sys/net shows the namespace of the process that opens it.
        script = "".join(f"echo '{value}' > /proc/sys/net/{name}\n" for name, value in settings.items())
        subprocess.run(["nsenter", f"--net={netns}", "--", "sh", "-e"], input=script, text=True, check=True)

    def _fault(self, kind: str, a: str, b: str, value: float, for_s: float) -> None:
        one, other = self._mask(a), self._mask(b) if b else ~self._mask(a) & (1 << len(self._addresses)) - 1
        for sender, receiver in ((one, other), (other, one)):
            self._ask(f"fault {kind} {sender:x} {receiver:x} {value!r} {for_s!r}")

    def _mask(self, name: str) -> int:
        """Return the set of nodes that a node's or a site's name stands for, as the router writes it."""
        sites = [line[1] for line in self._layout if line[0] == "site"]
        nodes = [line for line in self._layout if line[0] == "node"]
        found = [i for i, line in enumerate(nodes) if name in (line[1], sites[int(line[2]) - 1])]
        if not found:
            known = f"sites {', '.join(sites)}, nodes {', '.join(self._addresses)}"
            raise ValueError(f"there is no node or site {name} in bed {self.name}; it has {known}")
        return sum(1 << i for i in found)

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.settimeout(10)
            try:
                control.connect(_CONTROL + self.name)
                control.send(command.encode())
                reply = control.recv(1 << 16).decode()
            except OSError as error:
                raise ValueError(f"bed {self.name} is not up ({error}); `weft netbed up FILE` builds it") from error
        if not reply.startswith(("ok", "bed")):
            raise ValueError(f"bed {self.name}: {command}: {reply.strip()}")
        return reply

    def _end_router(self) -> None:
        if self._router is None:
            return
        for pipe in (self._router.stdin, self._router.stdout, self._router.stderr):
            if pipe is not None:
                pipe.close()
        try:
            self._router.wait(5)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()
        self._router = None


def beds() -> list[str]:
    """Return the names of all beds that are up on this machine."""
    prefix = "@" + _CONTROL[1:]
    lines = Path("/proc/net/unix").read_text().splitlines()
    names = [line.split()[-1].removeprefix(prefix) for line in lines if prefix in line]
    return sorted(set(names))


def _address(line: list[str]) -> str:
    """Return the address in a router's ``node NAME SITE HOST ...`` line."""
    return f"10.77.{line[2]}.{line[3]}"


def _fault_words(line: list[str], names: list[str]) -> str:
    _, kind, sender, receiver, value, left_s = line
    ends = [",".join(n for i, n in enumerate(names) if int(mask, 16) >> i & 1) for mask in (sender, receiver)]
    until = "until healed" if float(left_s) > _FOREVER_S / 2 else f"for {float(left_s):.1f} s more"
    return f"{kind} {ends[0]} -> {ends[1]}" + (f" {value}" if kind != "cut" else "") + f" {until}"


def router_input(topology: Topology) -> str:
    """Return the topology in the input format of ``router.c``; sites count from 1, as in addresses."""
    number = {site: i for i, site in enumerate(topology.sites, start=1)}
    lines = [f"bed {topology.name} {topology.mtu} {int(topology.queue_ms * 1e6)}"]
    lines += [f"site {site}" for site in topology.sites]
    for node in topology.nodes:
        host = topology.address(node.name).rpartition(".")[2]
        lines.append(f"node {node.name} {number[node.site]} {host} {node.uplink_mbps * 1e6}")
    for link in topology.links:
        a, b = (number[site] for site in link.sites)
        lines.append(f"path {a} {b} {int(link.latency_ms * 1e6)} {int(link.jitter_ms * 1e6)}")
    return "\n".join([*lines, "end", ""])


def site_commands(topology: Topology, site: str, netns: Callable[[str], str]) -> list[str]:
    """Return commands that create a site's bridge and its cables to all nodes, whose namespaces ``netns`` names."""
    commands = ["link set lo up", "link add lan type bridge", "link set lan up"]
    for i, name in enumerate(topology.members(site)):
        commands += [
            f"link add port{i} mtu {topology.mtu} type veth peer name lan0 mtu {topology.mtu} netns {netns(name)}",
            f"link set port{i} master lan up",
        ]
    return commands


def node_commands(topology: Topology, name: str) -> list[str]:
    """Return commands that give a node its address in the site's subnet, and a route through the line to all others."""
    address = topology.address(name)
    return [
        "link set lo up",
        f"address add {address}/24 dev lan0",
        "link set lan0 up",
        f"link set wan0 mtu {topology.mtu} txqueuelen 10000 up",
        f"route add 10.77.0.0/16 dev wan0 src {address} congctl {topology.congestion}",
    ]


def kernel_settings(topology: Topology) -> dict[str, str]:
    """Return the kernel settings of a node, by their names below ``/proc/sys/net``."""
    settings = {
        "ipv4/tcp_wmem": "4096 65536 33554432",
        "ipv4/tcp_no_metrics_save": "1",
        "ipv4/tcp_slow_start_after_idle": "0",  # as `weft doctor net` advises
    }
    if topology.window_kb:
        window = int(topology.window_kb * 1000)
        settings["ipv4/tcp_rmem"] = f"4096 {min(131072, window)} {window}"
    return settings
