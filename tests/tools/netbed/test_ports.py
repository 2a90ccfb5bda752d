"""Tests of a supervised run's listeners across sites, and their answers to a peer without the key."""

import json
import os
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from subprocess import PIPE
from time import sleep

import psutil
import pytest

from tests.quickstart import TINY_QUICKSTART
from weft.comm.native import Kind, build
from weft.tools.netbed import missing

pytest.importorskip("weft.engine.supervision", reason="needs the feature supervision")
from benchmarks.survival.hosts import BedHosts
from benchmarks.survival.run import SupervisedRun

DOCS = Path(__file__).parents[3] / "docs" / "wan.md"
ATTACKER = Path(__file__).parents[2] / "security" / "attacker.c"
CONNECTIONS = 1000
HOST_PORT, GROUP = "the host's port", "gloo"
SETTINGS = [
    *TINY_QUICKSTART,
    "cluster=two_sites",
    "pipeline.stages=4",
    "train.steps=100000",
    "checkpoint.every=0",
    "comm.connections=2",
]

CONNECT = """
import concurrent.futures, json, os, socket, sys

def try_port(address):
    try:
        with socket.create_connection(tuple(address), timeout=3) as client:
            client.settimeout(20)
            client.sendall(os.urandom(200))
            answer = 0
            try:
                while more := client.recv(4096):
                    answer += len(more)
            except ConnectionError:
                pass
            except TimeoutError:
                return "left open", answer
            return "closed", answer
    except TimeoutError:
        return "no answer", 0
    except OSError as error:
        return "refused", 0

addresses = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(json.dumps(list(pool.map(try_port, addresses))))
"""


def listening(bed, node):
    """Addresses beyond loopback on which ``node`` listens."""
    said = bed.run(node, ["ss", "-ltnH"], capture_output=True, text=True, check=True, timeout=30).stdout
    found = []
    for line in said.splitlines():
        address = address_of(line.split()[3])
        if not address[0].startswith("127.") and address[0] != "::1":
            found.append(address)
    return found


def connected(bed, node):
    """The two addresses of each connection of ``node`` that leaves it."""
    said = bed.run(node, ["ss", "-tnH", "state", "established"], capture_output=True, text=True, check=True, timeout=30)
    ends = [line.split()[2:4] for line in said.stdout.splitlines()]
    pairs = [tuple(address_of(end) for end in pair) for pair in ends]
    return [pair for pair in pairs if not pair[0][0].startswith("127.")]


def address_of(text):
    """Host and port of what ss prints."""
    host, _, port = text.rpartition(":")
    return host.strip("[]").removeprefix("::ffff:").partition("%")[0], int(port)


def site(address):
    """A node's address is 10.77.SITE.NUMBER."""
    return address[0].split(".")[2]


def try_port(bed, node, addresses):
    """Return the answer of each address to an unauthenticated peer in ``node``."""
    command = [sys.executable, "-c", CONNECT, json.dumps(addresses)]
    return json.loads(bed.run(node, command, capture_output=True, text=True, check=True, timeout=120).stdout)


def crowd(bed, node, address):
    """Open many connections from ``node``; no process of the run has many more files open meanwhile."""
    program = build([ATTACKER], kind=Kind.program)
    before = open_files()
    command = [program, os.geteuid(), 30, 0, *address, CONNECTIONS]
    with bed.popen(node, [str(word) for word in command], stdin=PIPE, stdout=PIPE, text=True) as attacker:
        assert attacker.stdout.readline() == "ready\n"
        sleep(0.3)
        grown = {process: count - before.get(process, count) for process, count in open_files().items()}
        assert json.loads(attacker.communicate("end")[0])["bytes_read"] == 0
    assert max(grown.values()) < CONNECTIONS / 2, (address, grown)


def open_files():
    """How many files each process of this test's runs has open."""
    counts = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            counts[process.pid] = process.num_fds()
    return counts


def documented():
    """The rows of the table of ports, by their first column."""
    section = DOCS.read_text().partition("## Ports")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: row for row in rows[2:]}


def row_of(address):
    """The row of the table that an address belongs to."""
    return HOST_PORT if address[1] == 29500 else GROUP


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")
def test_every_port_of_a_supervised_run_is_in_the_table_and_refuses_who_has_no_key(tmp_path):
    rows = documented()
    assert set(rows) == {HOST_PORT, GROUP}
    with closing(BedHosts(tmp_path)) as hosts, closing(SupervisedRun(tmp_path, SETTINGS, hosts)) as run:
        bed = hosts.bed
        run.wait_for_step(2)
        first, second = bed.nodes[0], bed.nodes[-1]

        def visited(node):
            """Return a node's listeners, and each port's answer to another node."""
            addresses = listening(bed, node)
            return zip(addresses, try_port(bed, second if node == first else first, addresses), strict=True)

        found, known = Counter(), {}
        with ThreadPoolExecutor(len(bed.nodes)) as pool:  # most of it is waiting for those that do not answer
            visits = dict(zip(bed.nodes, pool.map(visited, bed.nodes), strict=True))
        for node, answers in visits.items():
            for address, (answer, length) in answers:
                row = row_of(address)
                found[row] += 1
                assert address[0] == bed.address(node), f"{node} listens on {address}"
                assert re.search(rf"\b{answer}\b", rows[row][-1]), f"{node} {address}: {answer} after {length} bytes"
                assert length <= 200
                known.setdefault(row, set()).add(address)
        assert {address[0] for address in known[HOST_PORT]} == {bed.address(node) for node in bed.nodes}
        assert found[HOST_PORT] == len(bed.nodes) + 1, "the driver listens alongside the ranks of its host"
        print(f"listening sockets beyond loopback: {dict(found)}")
        between = [pair for node in bed.nodes for pair in connected(bed, node) if site(pair[0]) != site(pair[1])]
        assert between
        for pair in between:
            assert {*pair} & known[HOST_PORT], f"{pair} crosses sites, and is in no row of the table"
        for address in sorted({address for addresses in known.values() for address in addresses}):
            crowd(bed, second if address[0] == bed.address(first) else first, address)
        run.wait_for_step(run.step + 3)
        assert len(run.events("attempt")) == 1, "no attempt but the first"
