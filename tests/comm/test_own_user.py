"""Listeners of torch's library close connections of other users, before they send and after."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from weft.comm import listeners as module
from weft.comm.listeners import refuse_other_users
from weft.tools.local_ranks import answers_of

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
OTHER = 54321

CONNECT = """
import encodings.idna, os, resource, socket, struct, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
host, port, user, count = sys.argv[1], *map(int, sys.argv[2:])
os.setuid(user)
ends = [socket.create_connection((host, port), timeout=10) for _ in range(count)]
heard = []
for number, end in enumerate(ends):
    end.settimeout(10 if user else 0.2)
    try:
        end.sendall(struct.pack("q", number))
        heard.append("closed" if end.recv(1) == b"" else "answered")
    except ConnectionError:
        heard.append("closed")
    except TimeoutError:
        heard.append("open")
print(*sorted(set(heard)))
"""


@pytest.fixture
def listener(request):
    """Address of a gloo device of this process, and the device."""
    refuse_other_users(one_host=True)
    before = listeners()
    device = dist.ProcessGroupGloo.create_device(hostname=getattr(request, "param", "127.0.0.1"))
    (address,) = listeners() - before
    yield address
    del device


def listeners():
    """The addresses at which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN}


def connect(address, user, count=1):
    """Return the state of the connections of a process of ``user``, having sent a sequence number on each."""
    command = [sys.executable, "-c", CONNECT, *map(str, (*address, user, count))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@as_root
@pytest.mark.parametrize("listener", ["127.0.0.1", "::1"], indirect=True)
def test_gloo_listens_to_its_own_user_only(listener):
    assert connect(listener, OTHER) == "closed"
    assert connect(listener, os.geteuid()) == "open"


@as_root
def test_a_thousand_connections_of_another_user_leave_no_descriptor(listener):
    before = len(os.listdir("/proc/self/fd"))
    assert connect(listener, OTHER, 1000) == "closed"
    assert len(os.listdir("/proc/self/fd")) <= before
    assert connect(listener, os.geteuid()) == "open"


@as_root
def test_with_several_hosts_other_users_of_this_one_are_refused(listener):
    refuse_other_users(one_host=False)
    try:
        assert connect(listener, OTHER) == "closed"
        assert connect(listener, os.geteuid()) == "open"
    finally:
        refuse_other_users(one_host=True)


def attacked(device):
    """Return the state of another user's connections to this rank's listeners."""
    return [connect(address, OTHER) for address in listeners()]


@as_root
def test_ranks_that_measure_a_host_listen_to_their_own_user_only():
    assert answers_of(2, attacked, most_s=60) == {0: ["closed"], 1: ["closed"]}


def test_without_a_compiler_a_warning_names_what_is_missing(monkeypatch, caplog):
    def build(*_, **__):
        raise ValueError("there is no cc; install gcc and g++")

    module._library.cache_clear()
    module._warn.cache_clear()
    monkeypatch.setattr(module, "build", build)
    refuse_other_users(one_host=True)
    assert "other users of this host can connect to ranks" in caplog.text and "install gcc" in caplog.text
    module._library.cache_clear()


def test_the_source_is_in_the_wheel():
    assert "comm/*.c" in (Path(module.__file__).parents[1] / "setup.cfg").read_text()
