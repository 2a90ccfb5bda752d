"""Another user of a run's host gets into no connection of its ranks, reads nothing, and cannot end it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.quickstart import TINY_QUICKSTART, losses_of
from weft.comm.native import Kind, build
from weft.tools.netbed import missing

DOCS = Path(__file__).parents[3] / "docs" / "wan.md"
ATTACKER = Path(__file__).parents[2] / "security" / "attacker.c"
OTHER = 54321
RANKS = 2
CONNECTIONS = 1000
SETTINGS = [
    *TINY_QUICKSTART,
    "pipeline.stages=1",
    f"cluster.ranks={RANKS}",
    "zero.stage=1",
    "train.steps=100000",
    "logging.every=1",
    "checkpoint.every=0",
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")]


@contextmanager
def own_network():
    """Words in front of a command that run it in a network namespace, whose listeners are this test's alone."""
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        try:
            yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]
        finally:
            holder.kill()


@contextmanager
def running(command, folder):
    """A run, in a session of its own, with its output in a file."""
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=folder)
        children = []
        try:
            yield run
        finally:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(run.pid).children(recursive=True)
            for process in (run, *children):
                with suppress(ProcessLookupError, psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            run.wait()


@contextmanager
def attacking(inside, *arguments):
    """The attacker, whose report the result returns and which has ended by then."""
    program = build([ATTACKER], kind=Kind.program)
    command = [*inside, str(program), str(OTHER), *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout.readline() == "ready\n"
        yield lambda: json.loads(attacker.communicate("end")[0])
        attacker.kill()


def wait_for_step(run, folder, step):
    """Until the run has logged ``step``; the test's time limit ends a wait for nothing."""
    while max(losses_of(folder), default=0) < step:
        assert run.poll() is None, (folder / "output").read_text()[-3000:]
        time.sleep(0.1)


def listening(inside):
    """Address, port and process of every TCP listener."""
    said = subprocess.run([*inside, "ss", "-ltnpH"], capture_output=True, text=True, check=True, timeout=30).stdout
    rows = [line.split(maxsplit=5) for line in said.splitlines()]
    ends = [(*row[3].rpartition(":")[::2], int(re.search(r"pid=(\d+)", row[5])[1])) for row in rows]
    return [(host.strip("[]").removeprefix("::ffff:"), int(port), process) for host, port, process in ends]


CONNECT = """
import encodings.idna, json, os, socket, struct, sys
os.setuid(int(sys.argv[1]))
for host, port in json.loads(sys.argv[2]):
    try:
        with socket.create_connection((host, port), timeout=3) as client:
            client.settimeout(20)
            client.sendall(struct.pack("q", 0))
            print("answered" if client.recv(1) else "closed")
    except ConnectionError:
        print("closed")
    except TimeoutError:
        print("no answer")
"""


def answers(inside, addresses):
    """Return the answer of each address to the other user."""
    command = [*inside, sys.executable, "-c", CONNECT, str(OTHER), json.dumps(addresses)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()


def documented():
    """Return each row of the table of ports on one host: where, and what another user gets."""
    section = DOCS.read_text().partition("## Ports on one host")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0]: (row[1].split(",")[0], row[-1]) for row in rows[2:]}


def files_of(processes):
    """How many files processes have open."""
    return {process: psutil.Process(process).num_fds() for process in processes}


@pytest.mark.timeout(900)
def test_on_one_host_another_user_gets_into_no_port_of_a_run_and_reads_nothing(tmp_path):
    with ExitStack() as stack:
        inside = stack.enter_context(own_network())
        report = stack.enter_context(attacking(inside, 800, 40))
        weft = Path(sys.executable).with_name("weft")
        command = [*inside, str(weft), "launch", *SETTINGS, f"train.output_dir={tmp_path}"]
        run = stack.enter_context(running(command, tmp_path))
        wait_for_step(run, tmp_path, 2)
        heard = report()
        assert heard["listeners"] >= RANKS and heard["connections"] >= 40 * RANKS
        assert (heard["bytes_read"], heard["answers"], heard["open"]) == (0, 0, 0)

        found = listening(inside)
        rows = documented()
        got = answers(inside, [(host, port) for host, port, _ in found])
        seen = Counter()
        for (host, port, process), answer in zip(found, got, strict=True):
            fits = [name for name, (where, what) in rows.items() if (host, answer) == (where, what)]
            assert fits, f"{host}:{port} of process {process}: {answer}, which is in no row of the table"
            seen[fits[0]] += 1
        print(f"listening sockets: {dict(seen)}")

        ranks = {process for *_, process in found}
        before = files_of(ranks)
        step = max(losses_of(tmp_path))
        for host, port, _ in found:
            with attacking(inside, 20, 0, host, port, CONNECTIONS) as crowd:
                time.sleep(0.5)
                during = files_of(ranks)
                assert crowd()["bytes_read"] == 0
            assert all(during[rank] - before[rank] < CONNECTIONS / 4 for rank in ranks), (host, port, before, during)
        wait_for_step(run, tmp_path, step + 3)
        assert all(count <= before[rank] + 8 for rank, count in files_of(ranks).items())
        os.kill(run.pid, 0)
