"""Functions that run in a node: what they send, return, raise, and how they end."""

import os
import socket
import time

import psutil
import pytest

from weft.tools.netbed import Job, NetBed, Node, Topology, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"weft netbed: {missing()}")


@pytest.fixture(scope="module")
def bed():
    topology = Topology(name=f"job{os.getpid()}", nodes=(Node(name="a", site="s"), Node(name="b", site="s")))
    with NetBed.up(topology) as bed:
        yield bed


def greet(send, receive, host):
    with socket.create_server((host, 0)) as server:
        send(server.getsockname()[1])
        peer, _ = server.accept()
        with peer:
            peer.sendall(receive())
        return host


def fetch(send, receive, host, port):
    with socket.create_connection((host, port), timeout=10) as peer:
        return peer.recv(100)


def fail(send, receive):
    raise ValueError("on purpose")


def stay(send, receive):
    send(os.getpid())
    time.sleep(1000)


def test_two_jobs_talk_with_each_other_and_with_us(bed):
    with Job(bed, "a", greet, bed.address("a")) as server:
        port = server.receive()
        with Job(bed, "b", fetch, bed.address("a"), port) as client:
            server.send(b"hello")
            assert client.result(10) == b"hello"
        assert server.result(10) == bed.address("a")


def test_a_jobs_error_is_raised(bed):
    with Job(bed, "a", fail) as job, pytest.raises(RuntimeError, match=r"fail in node a failed(?s:.*)on purpose"):
        job.result(10)


def test_a_job_ends_with_its_context_and_silence_is_a_timeout(bed):
    with Job(bed, "a", stay) as job:
        pid = job.receive(10)
        with pytest.raises(TimeoutError, match=r"nothing within 0\.05 s"):
            job.receive(0.05)
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    with pytest.raises(RuntimeError, match="its process has ended"):
        job.receive(10)
