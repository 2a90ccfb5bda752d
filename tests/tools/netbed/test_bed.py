"""A bed that is up: reachability, delay, rate, faults, and nothing left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.waiting import until
from weft.tools.netbed import Link, NetBed, Node, Topology, missing
from weft.tools.netbed.bed import beds
from weft.tools.netbed.command import main

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")

# Talks to itself between two nodes: `serve PORT` answers with what it gets, `rtt` and `rate`
# print what the client sees.
ECHO = """
import socket, sys, time
what, host = sys.argv[1:3]
if what == "serve":
    server = socket.create_server((host, 5555))
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        while data := peer.recv(1 << 20):
            if data[:1] == b"p":
                peer.sendall(data)
        peer.close()
peer = socket.create_connection((host, 5555), timeout=float(sys.argv[3]))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
if what == "rtt":
    best = 9e9
    for _ in range(5):
        start = time.perf_counter()
        peer.sendall(b"p")
        peer.recv(1)
        best = min(best, time.perf_counter() - start)
    print(best * 1e3)
"""


def two_sites(name):
    nodes = [Node(name=n, site=s, uplink_mbps=200) for n, s in (("e0", "east"), ("e1", "east"), ("w0", "west"))]
    return Topology(name=name, nodes=tuple(nodes), links=(Link(sites=("east", "west"), latency_ms=15),))


@pytest.fixture(scope="module")
def bed():
    with NetBed.up(two_sites(f"test{os.getpid()}")) as bed:
        server = bed.popen("w0", [sys.executable, "-c", ECHO, "serve", "0.0.0.0"], stdout=subprocess.PIPE)
        neighbour = bed.popen("e1", [sys.executable, "-c", ECHO, "serve", "0.0.0.0"], stdout=subprocess.PIPE)
        for process in (server, neighbour):
            assert process.stdout.readline() == b"ready\n"
        yield bed
        for process in (server, neighbour):
            process.kill()
            process.wait()
            process.stdout.close()


@pytest.fixture(autouse=True)
def _healed(request):
    yield
    if "bed" in request.fixturenames:
        request.getfixturevalue("bed").heal()


def rtt_ms(bed, node, timeout_s=5.0):
    """Round trip from e0, or None where nothing answers."""
    command = [sys.executable, "-c", ECHO, "rtt", bed.address(node), str(timeout_s)]
    done = bed.run("e0", command, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None


def test_sites_are_far_and_neighbours_near(bed):
    far, near = rtt_ms(bed, "w0"), rtt_ms(bed, "e1")
    assert far >= 30.0
    assert near < far


def test_bytes_between_sites_pass_the_line_and_inside_a_site_do_not(bed):
    def sent():
        return {node.name: node.sent_packets for node in bed.status().nodes}

    earlier, before = None, sent()
    while before != earlier:  # what earlier connections still have to say
        time.sleep(0.3)
        earlier, before = before, sent()
    rtt_ms(bed, "e1")
    assert sent() == before
    rtt_ms(bed, "w0")
    assert sent()["e0"] > before["e0"]


def test_a_cut_stops_everything_until_it_ends(bed):
    bed.cut("east", "west", for_s=30)
    assert rtt_ms(bed, "w0", timeout_s=0.5) is None
    assert rtt_ms(bed, "e1") is not None
    assert bed.status().faults[0].startswith("cut e0,e1 -> w0 for ")
    bed.heal()
    assert bed.status().faults == ()
    assert rtt_ms(bed, "w0") is not None


def test_faults_count_what_they_drop_and_expire(bed):
    bed.drop("e0", share=1.0, for_s=2.0)
    before = {node.name: node.fault_drops for node in bed.status().nodes}["e0"]
    assert rtt_ms(bed, "w0", timeout_s=0.2) is None
    assert {node.name: node.fault_drops for node in bed.status().nodes}["e0"] > before
    until(lambda: bed.status().faults == ())


def test_unknown_names_and_a_second_bed_of_the_name_are_refused(bed):
    with pytest.raises(ValueError, match="there is no node e9"):
        bed.run("e9", ["true"])
    with pytest.raises(ValueError, match="no node or site north"):
        bed.cut("north")
    with pytest.raises(ValueError, match="is up already"):
        NetBed.up(two_sites(bed.name))
    with pytest.raises(ValueError, match=r"bed nosuch is not up.*weft netbed up"):
        NetBed("nosuch").status()


def namespaces_of(bed):
    return {Path(f"/proc/{bed.status().pid}/fd/{line[4]}").stat().st_ino for line in bed._layout if line[0] == "node"}


def living(namespaces):
    """Processes that still are in one of the namespaces."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            if entry.stat().st_ino in namespaces:
                found.append(entry)
    return found


def test_down_ends_what_runs_in_the_bed():
    with NetBed.up(two_sites(f"down{os.getpid()}")) as bed:
        inside = namespaces_of(bed)
        sleeper = bed.popen("e0", ["sleep", "1000"])
        until(lambda: living(inside))
    assert sleeper.wait(5) == -signal.SIGKILL
    assert not living(inside)
    assert bed.name not in beds()


def test_nothing_outlives_an_owner_that_is_killed():
    name = f"crash{os.getpid()}"
    script = (
        "import sys, time\nfrom weft.tools.netbed import *\n"
        f"bed = NetBed.up(Topology(name={name!r}, nodes=(Node(name='a', site='s'), Node(name='b', site='t')), "
        "links=(Link(sites=('s', 't'), latency_ms=1),)))\n"
        "sleeper = bed.popen('a', ['sleep', '1000'])\nprint('up', flush=True)\ntime.sleep(1000)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"up\n"
    inside = namespaces_of(NetBed(name))
    until(lambda: living(inside))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: name not in beds() and not living(inside))


def test_the_command_builds_uses_and_ends_a_bed(tmp_path, capfd):
    name = f"cli{os.getpid()}"
    path = tmp_path / "bed.yaml"
    path.write_text(f"name: {name}\nsites: {{east: [a], west: [b]}}\nlinks: [{{sites: [east, west], latency_ms: 1}}]\n")
    assert main(["up", str(path)]) == 0
    try:
        assert main(["--bed", name, "exec", "a", "ip", "-brief", "address", "show", "lan0"]) == 0
        assert "10.77.1.1/24" in capfd.readouterr().out
        assert main(["--bed", name, "fault", "slow", "a", "--by", "5"]) == 0
        assert main(["--bed", name, "status"]) == 0
        assert "slow a -> b 5" in capfd.readouterr().out
        assert main(["--bed", name, "heal"]) == 0
    finally:
        assert main(["--bed", name, "down"]) == 0
    assert name not in beds()
